"""An HTTP server: protocols of OpenAI and Anthropic over one engine; needs the extra 'server'."""
