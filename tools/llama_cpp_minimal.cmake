# Read at the end of llama.cpp's project() call, through CMAKE_PROJECT_llama.cpp_INCLUDE.
# llama-cpp-python forces this option on just before, and no -D can override that. The common library serves llama.cpp's
# own tools; the Python binding does not link to it. Without it the build takes less than half the time.
set(LLAMA_BUILD_COMMON OFF CACHE BOOL "" FORCE)
