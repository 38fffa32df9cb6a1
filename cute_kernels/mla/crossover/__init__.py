"""MLA decoding by clusters of two CTAs that exchange dequantized keys through distributed shared memory."""
