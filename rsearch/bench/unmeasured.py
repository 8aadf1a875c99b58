"""What a subject raises that works, and still has no number to give."""


class Unmeasured(Exception):
    """Tells why in a line, which stands in the number's place."""
