"""TODO extract/gym/choices"""
