"""Upcycled-FL: a server step without client data after every step with it."""
