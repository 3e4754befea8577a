"""HTTP requests and answers: who asks, under which id, and how an answer is sent."""
