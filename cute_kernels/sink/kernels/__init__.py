"""Device code of sink attention: forward, backward, and the launches that prepare them."""
