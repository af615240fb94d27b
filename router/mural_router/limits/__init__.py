"""What tenants may use, counted over all routers, and who is next when the fleet is full."""
