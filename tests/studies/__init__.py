"""Tests of studies: their files, their execution and their pages."""
