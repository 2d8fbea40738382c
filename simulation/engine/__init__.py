"""TFF computations run by this process's own TensorFlow."""
