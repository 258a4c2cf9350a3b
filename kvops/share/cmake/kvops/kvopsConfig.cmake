# find_package(kvops): the targets kvops::kvops and, if the package has CUDA kernels, kvops::cuda. A program that links
# one has kvops.h and loads the library, which registers the operators. CMAKE_PREFIX_PATH must name the folder that
# `python -c "import kvops; print(kvops.cmake_prefix_path())"` prints, and torch.utils.cmake_prefix_path.
include(CMakeFindDependencyMacro)
find_dependency(Torch)
get_filename_component(package "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
foreach(pair kvops=libkvops.so cuda=libkvops_cuda.so)
  string(REPLACE "=" ";" pair ${pair})
  list(POP_FRONT pair target)
  if(EXISTS "${package}/${pair}" AND NOT TARGET kvops::${target})
    add_library(kvops::${target} SHARED IMPORTED)
    set_target_properties(kvops::${target} PROPERTIES IMPORTED_LOCATION "${package}/${pair}" IMPORTED_NO_SONAME ON)
    target_include_directories(kvops::${target} INTERFACE "${package}/include")
    target_compile_features(kvops::${target} INTERFACE cxx_std_20)
    target_link_libraries(kvops::${target} INTERFACE ${TORCH_LIBRARIES})
    target_link_options(kvops::${target} INTERFACE LINKER:--no-as-needed) # no symbol of it is used
  endif()
endforeach()
if(TARGET kvops::cuda)
  target_link_libraries(kvops::cuda INTERFACE kvops::kvops)
endif()
