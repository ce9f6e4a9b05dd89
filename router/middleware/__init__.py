"""What every request passes first: ids, keys, hosts and origins."""
