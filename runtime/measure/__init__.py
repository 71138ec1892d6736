"""TODO runtime/measure"""
