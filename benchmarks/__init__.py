"""Speed, as ratios inside one run."""
