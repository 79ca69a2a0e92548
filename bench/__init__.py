"""Demo, benchmarks and trace replay: each prints a table and the machine that it ran on."""
