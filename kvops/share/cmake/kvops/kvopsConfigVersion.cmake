# find_package(kvops 0.1): the version of the package, and whether it serves the one that is asked for: an equal or newer
# one of the same major version or, before 1.0, of the same minor version.
file(STRINGS "${CMAKE_CURRENT_LIST_DIR}/../../../version.py" PACKAGE_VERSION REGEX "^__version__")
string(REGEX MATCH "[0-9]+(\\.[0-9]+)*" PACKAGE_VERSION "${PACKAGE_VERSION}")
string(REGEX MATCH "^(0\\.[0-9]+|[1-9][0-9]*)" _kvops_series "${PACKAGE_VERSION}.")
if("${PACKAGE_FIND_VERSION}." MATCHES "^${_kvops_series}\\." AND NOT PACKAGE_VERSION VERSION_LESS PACKAGE_FIND_VERSION)
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
endif()
if(PACKAGE_VERSION VERSION_EQUAL PACKAGE_FIND_VERSION)
  set(PACKAGE_VERSION_EXACT TRUE)
endif()
unset(_kvops_series)
