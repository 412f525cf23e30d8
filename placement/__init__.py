"""The cluster as specified: what should run where (plan, pure), starting and stopping it, and what runs now."""
