"""The KServe v2 (open inference) protocol over gRPC, beside the HTTP frontend.."""
