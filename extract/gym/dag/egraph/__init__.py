"""TODO extract/gym/dag/egraph"""
