"""What turns the bus into processes: workers, their supervision, and the embedded server of a working folder."""
