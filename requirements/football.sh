#!/usr/bin/env bash
# Installs gfootball into a virtual environment: football.sh VENV/bin/python
# Prints the Debian packages that building it lacks: football.sh --lacking VENV/bin/python
#
# There is no wheel of it, and its own requirements don't install any more. So it is built here, once
# (several minutes); the wheel is kept in ~/.cache/torchrl_hts/wheels for the next time.
set -euo pipefail
only_lacking=
if [ "${1-}" = --lacking ]; then
    only_lacking=yes
    shift
fi
python=${1:?usage: football.sh [--lacking] VENV/bin/python}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
version=$(sed -n 's/^gfootball==//p' "$here/constraints.txt")
cache=${XDG_CACHE_HOME:-$HOME/.cache}/torchrl_hts/wheels
tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')

fail() {
    echo "error: $1" >&2
    exit 1
}

installed() {
    "$python" -c "
import importlib.metadata, sys
import gfootball_engine
sys.exit(importlib.metadata.version('gfootball') != '$version')" 2>/dev/null
}

cached_wheel() {
    find "$cache" -name "gfootball-$version-$tag-*.whl" 2>/dev/null | head -n 1
}

# The Debian packages that the build lacks, by what it looks for.
missing_packages() {
    command -v cmake >/dev/null || echo cmake
    if ! command -v g++ >/dev/null || ! command -v make >/dev/null; then
        echo build-essential # and whatever headers are missing, which need it to be looked for
        return
    fi
    local header package
    while read -r header package; do
        echo "#include <$header>" | g++ -E -I"$include" -x c++ - >/dev/null 2>&1 || echo "$package"
    done <<END
Python.h python3-dev
SDL2/SDL.h libsdl2-dev
SDL2/SDL_image.h libsdl2-image-dev
SDL2/SDL_ttf.h libsdl2-ttf-dev
SDL2/SDL2_gfxPrimitives.h libsdl2-gfx-dev
EGL/egl.h libegl-dev
GL/gl.h libgl-dev
END
    local library
    for library in "python${tag#cp}:python" thread:thread system:system filesystem:filesystem; do
        echo 'int main() {}' | g++ -x c++ - -o /dev/null "-lboost_${library%:*}" 2>/dev/null ||
            echo "libboost-${library#*:}-dev"
    done
}

include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
if [ -n "$only_lacking" ]; then
    installed || [ -n "$(cached_wheel)" ] || missing_packages
    exit
fi
if installed; then
    echo "gfootball $version is installed"
    exit
fi

if [ -z "$(cached_wheel)" ]; then
    missing=$(missing_packages | tr '\n' ' ')
    if [ -n "$missing" ]; then
        fail "building gfootball needs Debian packages that are missing. Install them with
    apt-get install --no-install-recommends ${missing% }
and run 'make football' again (Boost.Python must be that of Python ${tag#cp}, the virtual environment's)"
    fi
    # The build runs a bare python3.
    PATH=$(cd "$(dirname "$python")" && pwd):$PATH
    export PATH
    echo "building gfootball $version, which takes several minutes"
    "$python" -m pip install --quiet --constraint "$here/constraints.txt" psutil setuptools wheel
    mkdir -p "$cache"
    "$python" -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir "$cache" \
        "gfootball==$version" || fail "gfootball could not be built; what the compiler said is above"
fi

# Without their own requirements, which ask for a second OpenCV and for pygame.
"$python" -m pip install --quiet --no-deps "$(cached_wheel)"
"$python" -m pip install --quiet --no-deps --constraint "$here/constraints.txt" \
    absl-py cloudpickle gym six
"$python" -m pip install --quiet --constraint "$here/constraints.txt" opencv-python-headless
installed || fail "gfootball was installed and can't be imported:
$("$python" -c 'import gfootball_engine' 2>&1 | tail -n 1)
If a library is missing, install the packages of docs/results/football.md; if it was built for another system,
delete $(cached_wheel) and run 'make football' again"
echo "gfootball $version is installed"
