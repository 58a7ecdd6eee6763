"""What gloo cannot do by itself: be aborted, and change its members.  Why, and until when: docs/ring.md."""
