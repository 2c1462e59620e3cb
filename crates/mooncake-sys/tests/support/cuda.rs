//! What of CUDA this machine has.

/// Whether the loader finds by itself all that a CUDA 13 build of Mooncake needs.
pub(crate) fn has_cuda_13() -> bool {
    // SAFETY: asks the loader, which runs the initialisers of CUDA's own libraries.
    ["libcuda.so.1", "libcudart.so.13"]
        .iter()
        .all(|name| unsafe { libloading::Library::new(name).is_ok() })
}
