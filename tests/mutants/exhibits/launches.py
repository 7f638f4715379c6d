"""What a launch writes into scripts."""

from tests.mutants.exhibit import Exhibit

KIND = "launches"
EXHIBITS = (
    Exhibit(
        name="words_of_srun_are_not_quoted",
        source="our own: NeMo-Run 0.11.1, whose `noquote` is `str`",
        bug="NeMo-Run writes the words of srun without quotes, so that a space, $ or ; in an image or mount makes other words.",
        cost="The job starts in another image or with other mounts, or ends after it got its machines.",
        symbol="_executor",
        old="container_image=image and shlex.quote(image.image)",
        new="container_image=image and image.image",
        tests=("tests/launch/test_odd_words.py::test_each_odd_word_reaches_srun_and_sbatch_as_it_is",),
    ),
    Exhibit(
        name="a_password_in_a_url_is_in_the_script",
        source="our own: DATABASE_URL, HTTPS_PROXY and MY_PASS in a profile's environment",
        bug="A variable is taken for a secret by a few names only, and never by its value.",
        cost="Passwords stand in the job's scripts and logs, which all users of a cluster may read.",
        symbol="has_secret",
        old="return _VALUE.search(text) is not None",
        new="return False",
        tests=("tests/launch/test_odd_words.py::test_secrets_are_refused_by_name_and_by_value_and_not_printed",),
    ),
)
