"""A run as processes of their own: who starts them, how they find each other, and what they say to the controller."""
