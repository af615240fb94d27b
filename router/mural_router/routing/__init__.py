"""What happens to a request before and around its bytes; knows nothing of how they travel.

The proxy and the endpoint picker both ask here.
"""
