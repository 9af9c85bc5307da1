"""Energy of a generation from a battery's rate: samples read, integrated inside windows, compared, drawn."""
