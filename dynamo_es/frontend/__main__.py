"""``python -m dynamo_es.frontend``, with Dynamo's arguments."""

from dynamo_es.frontend.dynamo_main import main

if __name__ == "__main__":
    main()
