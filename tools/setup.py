"""Create .venv and fill it with the versions of requirements.lock and with tieq itself.

Run by `make setup`; needs nothing but a Python that has venv. Kept to syntax that Python 3.6 parses, so that
a Python that is too old gets a sentence instead of a traceback.
"""

import argparse
import glob
import hashlib
import json
import os
import platform
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
VENV_PYTHON = os.path.join(VENV, "bin", "python")
STAMP = os.path.join(VENV, "setup-stamp.json")
LOCK = os.path.join(ROOT, "requirements.lock")
CMAKE_INCLUDE = os.path.join(ROOT, "tools", "llama_cpp_minimal.cmake")
# What decides the content of .venv; a change in one of them makes the next setup run again.
INPUTS = ("pyproject.toml", "requirements.lock", "tools/setup.py", "tools/llama_cpp_minimal.cmake")

LLAMA = "llama-cpp-python"

OLDEST, NEWEST = (3, 10), (3, 13)
PLAIN_INTERVAL = 20.0  # seconds between two progress lines where there is no terminal
AGAIN = "Then run `make setup` again; finished steps are not repeated."

# What the Python binding does not use stays unbuilt.
CMAKE_OPTIONS = [
    "-DLLAVA_BUILD=OFF",
    "-DLLAMA_BUILD_TOOLS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_ALL_WARNINGS=OFF",
    "-DGGML_ALL_WARNINGS=OFF",
]

# Language -> environment variable, usual commands, a program that needs the standard library to be complete.
COMPILERS = {
    "C++": ("CXX", ["c++", "g++", "clang++"], "#include <filesystem>\n#include <vector>\nint main() {}\n"),
    "C": ("CC", ["cc", "gcc", "clang"], "#include <stdio.h>\nint main(void) { return 0; }\n"),
}
COMPILER_ADVICE = """\
  Debian, Ubuntu:  apt-get install build-essential
  Fedora:          dnf install gcc gcc-c++
  macOS:           xcode-select --install"""

# What a failed installation's log may show, and what to do about it.
KNOWN_FAULTS = [
    (
        r"No matching distribution|Could not find a version|NewConnectionError|name resolution|ReadTimeout",
        "The package index could not be reached or lacks the package: check the network and pip's settings.",
    ),
    (
        r"No space left on device",
        "The disk is full: .venv takes about 1.5 GB, the build 1 GB of temporary space.",
    ),
    (r"\bKilled\b|out of memory", "The compiler ran out of memory: CMAKE_BUILD_PARALLEL_LEVEL=1 make setup"),
    (
        r"CMake \S+ or higher is required|Could not find CMake|cmake: (command )?not found",
        "CMake 3.21 or newer is missing: install your system's package 'cmake'.",
    ),
]


class SetupError(Exception):
    """Setup can't go on; the text says what happened and what to do."""


def say(text):
    print(text, file=sys.stderr, flush=True)


def clock(seconds):
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes}:{seconds:02d}"


class Progress:
    """One updating line on a terminal, a plain line now and then elsewhere."""

    def __init__(self, label):
        self.label = label
        self.status = "starting"
        self.started = self.last_plain = time.monotonic()
        self.counting_since = None
        self.terminal = sys.stderr.isatty()

    def read(self, line):
        """Take the status from one line of pip's or ninja's output."""
        counter = re.match(r"\s*\[(\d+)/(\d+)\]", line)
        fetch = re.match(r"\s*(Collecting|Downloading|Using cached) (\S+)(?: \(([\d.]+ [kMG]B)\))?", line)
        if counter:
            self.count(int(counter.group(1)), int(counter.group(2)))
        elif fetch and self.counting_since is None:
            verb, name, size = fetch.groups()
            self.status = f"{verb.lower()} {name.rsplit('/', 1)[-1]}" + (f" ({size})" if size else "")
        elif "Installing collected packages" in line:
            self.status = f"installing, packages: {line.count(',') + 1}"
        elif "Configuring CMake" in line:
            self.status = "configuring the build"

    def count(self, done, total):
        now = time.monotonic()
        if self.counting_since is None:
            self.counting_since = now
        elapsed = now - self.counting_since
        self.status = f"compiled {done} of {total} files" if done < total else "packing the wheel"
        if 5 <= done < total and elapsed > 10:
            self.status += f", about {clock(elapsed * (total - done) / done)} left"

    def show(self):
        now = time.monotonic()
        text = f"      {self.label}: {self.status} [{clock(now - self.started)}]"
        if self.terminal:
            sys.stderr.write("\r\033[K" + text[: shutil.get_terminal_size().columns - 1])
            sys.stderr.flush()
        elif now - self.last_plain >= PLAIN_INTERVAL:
            self.last_plain = now
            say(text)

    def end(self, word):
        if self.terminal:
            sys.stderr.write("\r\033[K")
        say(f"      {self.label}: {word} after {clock(time.monotonic() - self.started)}")


def clean_environment():
    """The caller's environment less what would redirect pip or the new interpreter."""
    dropped = {"PYTHONHOME", "PYTHONPATH", "PIP_TARGET", "PIP_USER", "PIP_PREFIX", "PIP_REQUIRE_VIRTUALENV"}
    env = {key: value for key, value in os.environ.items() if key not in dropped}
    env.update(PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1", PYTHONUNBUFFERED="1")
    return env


def capture(command):
    """Exit code and text of a short command; 127 where it can't be started."""
    try:
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=clean_environment(),
        )
    except OSError as error:
        return 127, str(error)
    return result.returncode, result.stdout.decode(errors="replace").strip()


def run_pip(label, log_name, *arguments, **extra_environment):
    """Run a pip command with its output in a log under .venv and its progress on the terminal.

    Raises:
        SetupError: pip failed; the message has the end of the log and the likely causes.
    """
    log_path = os.path.join(VENV, log_name)
    command = [VENV_PYTHON, "-m", "pip", *arguments]
    env = clean_environment()
    env.update(extra_environment)
    progress = Progress(label)
    lines = queue.Queue()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
        errors="replace",
    )

    def pump():
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=pump, daemon=True).start()
    with open(log_path, "w", encoding="utf-8", errors="replace") as log:
        log.write(f"$ {' '.join(command)}\n")
        try:
            line = ""
            while line is not None:
                try:
                    line = lines.get(timeout=1.0)
                except queue.Empty:
                    line = ""
                if line:
                    log.write(line)
                    log.flush()
                    progress.read(line)
                progress.show()
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            progress.end("interrupted")
            raise
    if process.wait() != 0:
        progress.end("failed")
        raise SetupError(describe_failure(label, log_path))
    progress.end("done")


def describe_failure(label, log_path):
    with open(log_path, encoding="utf-8", errors="replace") as log:
        lines = log.read().splitlines()
    excerpt = lines[-12:]
    # pip's closing words are its own; what the compiler or CMake said stands further up.
    first = next((at for at, line in enumerate(lines) if re.search(r"\berror\b", line, re.IGNORECASE)), len(lines))
    if first < len(lines) - 12:
        excerpt = [*lines[first : min(first + 8, len(lines) - 12)], "...", *excerpt]
    text = "\n".join(lines)
    causes = [advice for pattern, advice in KNOWN_FAULTS if re.search(pattern, text)]
    shown = "\n".join("      | " + line[:200] for line in excerpt)
    log_name = os.path.relpath(log_path, ROOT)
    return "\n".join([f"{label} could not be installed. From {log_name}:", shown, *causes, AGAIN])


def compiler_fault(language):
    """What is wrong with the machine's compiler for a language, or None."""
    variable, names, program = COMPILERS[language]
    names = [os.environ[variable]] if os.environ.get(variable) else names
    fault = f"no {language} compiler was found (looked for {', '.join(names)})"
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "probe.cpp" if language == "C++" else "probe.c")
        with open(source, "w") as stream:
            stream.write(program)
        for name in names:
            if not shutil.which(name.split()[0]):
                continue
            standard = ["-std=c++17"] if language == "C++" else []
            code, text = capture([*name.split(), *standard, source, "-o", os.path.join(folder, "probe")])
            if code == 0:
                return None
            first = text.splitlines()[0][:200] if text else "no message"
            fault = f"the {language} compiler '{name}' can't build a trivial program ({first})"
    return fault


def check_compilers():
    faults = [fault for fault in map(compiler_fault, COMPILERS) if fault]
    if faults:
        found = ", and ".join(faults)
        raise SetupError(
            f"llama.cpp has to be compiled, but {found}. Install the compilers:\n{COMPILER_ADVICE}\n{AGAIN}"
        )


def supported(version):
    return OLDEST <= tuple(version) <= NEWEST


def check_interpreter():
    version = sys.version_info[:2]
    if not supported(version):
        span = " to ".join("{}.{}".format(*bound) for bound in (OLDEST, NEWEST))
        raise SetupError(
            f"{sys.executable} is Python {version[0]}.{version[1]}; tieq needs {span}, the versions that "
            "all its dependencies support. Name a suitable one: make setup PYTHON=python3.11"
        )


def venv_version():
    """(major, minor) of the Python in .venv, or None where it is absent, broken or copied from elsewhere."""
    question = "import sys; print(sys.version_info[0], sys.version_info[1], sys.prefix)"
    code, answer = capture([VENV_PYTHON, "-c", question])
    # Scripts of a copied .venv start with the path of the original, which may belong to another checkout.
    if code != 0 or read_stamp().get("root", ROOT) != ROOT:
        return None
    major, minor, prefix = answer.split(" ", 2)
    return (int(major), int(minor)) if os.path.realpath(prefix) == os.path.realpath(VENV) else None


def create_venv(match_python):
    current = venv_version()
    wanted = sys.version_info[:2]
    if current and supported(current) and (current == wanted or not match_python):
        return
    check_interpreter()
    say(f"[1/4] Creating .venv with Python {wanted[0]}.{wanted[1]}")
    if os.path.exists(VENV):
        shutil.rmtree(VENV)
    code, text = capture([sys.executable, "-m", "venv", VENV])
    if code != 0:
        raise SetupError(
            f"{sys.executable} could not create .venv:\n{text}\n"
            f"On Debian and Ubuntu venv is a package of its own: apt-get install python3-venv\n{AGAIN}"
        )


def llama_pin():
    with open(LOCK, encoding="utf-8") as stream:
        match = re.search(rf"^{re.escape(LLAMA)}==([^\s;]+)", stream.read(), re.MULTILINE)
    if not match:
        raise SetupError(f"requirements.lock has no line '{LLAMA}==VERSION'; restore the file from git.")
    return match.group(1)


def processor():
    """The instruction sets of this machine: llama.cpp is compiled for the very processor it is built on."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as stream:
            match = re.search(r"^(?:flags|Features)\s*:(.*)$", stream.read(), re.MULTILINE)
    except OSError:
        match = None
    return " ".join(sorted(match.group(1).split())) if match else platform.processor()


def build_key(version):
    """Name of a build; the same key means an interchangeable wheel."""
    asked = [version, *CMAKE_OPTIONS, os.environ.get("CMAKE_ARGS", "")]
    parts = [platform.system(), platform.machine(), processor(), *asked]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def wheel_folder(key):
    """Where a wheel is kept for the machine's other checkouts; pip's own cache disregards build options."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(os.environ.get("TIEQ_CACHE") or os.path.join(base, "tieq"), "wheels", key)


def install_llama(version, key):
    installed = [VENV_PYTHON, "-c", f"from importlib.metadata import version; print(version('{LLAMA}'))"]
    if read_stamp().get("llama") == key and capture(installed) == (0, version):
        return
    wheels = glob.glob(os.path.join(wheel_folder(key), "*.whl"))
    if wheels:
        say(f"[2/4] llama.cpp: {LLAMA} {version}, built earlier on this machine")
    else:
        wheels = [build_llama(version, wheel_folder(key))]
    # Its dependencies come with the lock.
    run_pip("llama.cpp wheel", "llama-install.log", "install", "--no-deps", "--force-reinstall", wheels[0])


def build_llama(version, folder):
    """Compile the wheel and return its path in the given folder."""
    check_compilers()
    cores = os.cpu_count() or 1
    say(f"[2/4] llama.cpp: compiling {LLAMA} {version} on {cores} cores, once a machine.")
    say("      This takes about 5 minutes on 2 idle cores. The full output goes to .venv/llama-build.log")
    # CMAKE_ARGS is split like a shell command; the quotes protect a path with spaces.
    options = [*CMAKE_OPTIONS, f'"-DCMAKE_PROJECT_llama.cpp_INCLUDE={CMAKE_INCLUDE}"']
    environment = {
        "CMAKE_ARGS": " ".join([*options, os.environ.get("CMAKE_ARGS", "")]).strip(),
        "CMAKE_BUILD_PARALLEL_LEVEL": os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(cores),
    }
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    # Built beside its place and moved there whole: an interrupted build leaves nothing that looks finished.
    with tempfile.TemporaryDirectory(dir=os.path.dirname(folder)) as scratch:
        built = os.path.join(scratch, "built")
        # -v lets the build's own output through.
        arguments = ["-v", "--progress-bar", "off", "--no-cache-dir", "--no-deps", "--wheel-dir", built]
        run_pip("llama.cpp", "llama-build.log", "wheel", *arguments, f"{LLAMA}=={version}", **environment)
        if not os.path.isdir(folder):
            os.rename(built, folder)
    return glob.glob(os.path.join(folder, "*.whl"))[0]


def inputs_digest():
    digest = hashlib.sha256()
    for name in INPUTS:
        with open(os.path.join(ROOT, name), "rb") as stream:
            content = stream.read()
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def read_stamp():
    try:
        with open(STAMP, encoding="utf-8") as stream:
            return json.load(stream)
    except (OSError, ValueError):
        return {}


def main():
    parser = argparse.ArgumentParser(description="Create .venv and install tieq with its locked dependencies.")
    parser.add_argument("--match-python", action="store_true", help="replace a .venv of another Python version")
    match_python = parser.parse_args().match_python

    started = time.monotonic()
    stamp = read_stamp()
    version = llama_pin()
    state = {"root": ROOT, "inputs": inputs_digest(), "llama": build_key(version)}
    same_python = not match_python or stamp.get("python") == list(sys.version_info[:2])
    if all(stamp.get(key) == value for key, value in state.items()) and same_python and venv_version():
        return

    create_venv(match_python)
    install_llama(version, state["llama"])
    say("[3/4] The packages of requirements.lock")
    run_pip("packages", "packages.log", "install", "--progress-bar", "off", "-r", LOCK)
    say("[4/4] tieq itself, editable")
    # The backend is in the lock, so no isolated environment has to be made for it.
    run_pip("tieq", "tieq.log", "install", "--no-deps", "--no-build-isolation", "--editable", ROOT)
    state["python"] = list(venv_version() or ())
    with open(STAMP, "w", encoding="utf-8") as stream:
        json.dump(state, stream)
    say(f"Setup took {clock(time.monotonic() - started)}. The command is .venv/bin/tieq")


if __name__ == "__main__":
    try:
        main()
    except SetupError as error:
        say(f"setup: {error}")
        sys.exit(1)
    except KeyboardInterrupt:
        say("setup: interrupted; run `make setup` to go on.")
        sys.exit(130)
