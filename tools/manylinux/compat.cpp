// What libstdc++ after GCC 8 has outside of its headers, for a wheel that runs on the libstdc++ of GCC 8: the platform tag
// manylinux_2_28 allows GLIBCXX_3.4.24. The linker takes from here what the kernels use, and hides it, as Red Hat's
// libstdc++_nonshared.a does in the manylinux_2_28 container. It is linked only where glibc is newer than 2.28.
#include <new>
#include <sstream>

// glibc 2.32: "the process has one thread", by which shared_ptr saves atomic instructions. Here it never does.
extern "C" {
char __libc_single_threaded = 0;
}

namespace std {
void __throw_bad_array_new_length() { throw bad_array_new_length(); }  // GLIBCXX_3.4.29

template basic_stringstream<char>::basic_stringstream();    // GLIBCXX_3.4.26
template basic_istringstream<char>::basic_istringstream();  // GLIBCXX_3.4.26
template basic_ostringstream<char>::basic_ostringstream();  // GLIBCXX_3.4.26
template string basic_stringbuf<char>::str() const &;       // GLIBCXX_3.4.29
template string basic_stringbuf<char>::str() &&;            // GLIBCXX_3.4.29
}  // namespace std
