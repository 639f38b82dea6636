"""What the benchmark measures: time steps, rounds and proposals apart, and read compiled programs."""
