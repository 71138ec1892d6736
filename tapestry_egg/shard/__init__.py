"""TODO tapestry_egg/shard"""
