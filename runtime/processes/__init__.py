"""TODO runtime/processes"""
