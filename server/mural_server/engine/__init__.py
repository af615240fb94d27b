"""The engine core: requests, scheduler, block pool, step loop and the border of its process."""
