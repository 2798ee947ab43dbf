"""The SQL of torture runs. It reads what the bus wrote, and shares no text with the SQL of the bus."""
