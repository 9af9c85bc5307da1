"""The bridge process: one worker's link, from the bus to the cable and back. It opens nothing that it carries."""
