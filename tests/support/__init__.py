"""Code shared by the tests: servers, waiting, builders."""
