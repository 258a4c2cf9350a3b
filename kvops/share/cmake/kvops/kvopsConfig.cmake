# find_package(kvops): the targets kvops::kvops and, if the package has CUDA kernels, kvops::cuda. A program that links
# one has kvops.h and loads the library, which registers the operators. CMAKE_PREFIX_PATH must name the folder that
# `python -c "import kvops; print(kvops.cmake_prefix_path())"` prints, and torch.utils.cmake_prefix_path.
include(CMakeFindDependencyMacro)
find_dependency(Torch)
get_filename_component(_kvops_package "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
if(NOT EXISTS "${_kvops_package}/libkvops.so")
  set(kvops_FOUND FALSE)
  set(kvops_NOT_FOUND_MESSAGE "${_kvops_package}/libkvops.so has not been built")
  return()
endif()

function(_kvops_import target library)
  if(EXISTS "${library}" AND NOT TARGET ${target})
    add_library(${target} SHARED IMPORTED)
    set_target_properties(${target} PROPERTIES IMPORTED_LOCATION "${library}")
    target_include_directories(${target} INTERFACE "${_kvops_package}/include")
    target_compile_features(${target} INTERFACE cxx_std_20)
    target_link_libraries(${target} INTERFACE ${TORCH_LIBRARIES} ${ARGN})
    target_link_options(${target} INTERFACE LINKER:--no-as-needed) # no symbol of it is used
  endif()
endfunction()
_kvops_import(kvops::kvops "${_kvops_package}/libkvops.so")
_kvops_import(kvops::cuda "${_kvops_package}/libkvops_cuda.so" kvops::kvops)
unset(_kvops_package)
