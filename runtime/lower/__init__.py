"""TODO runtime/lower"""
