//! Device code: the PTX that is built in, made from its CUDA C++ source.

use cudarc::nvrtc::{CompileError, CompileOptions, compile_ptx_with_opts};

use crate::{Result, workspace::Workspace};

/// Where device code lies, and the names of its sources.
const FOLDER: &str = "crates/transport-mooncake-direct/src/cuda";
const SOURCES: [&str; 2] = ["gather", "tensors"];
/// The device code runs on this and everything newer.
const ARCH: &str = "compute_70";
/// The version of PTX that the oldest supported driver, that of CUDA 12.3, reads.
const VERSION: &str = ".version 8.3";

/// Compiles the sources and writes the PTX of each beside it.
pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    SOURCES.iter().try_for_each(|name| compile(workspace, name))
}

fn compile(workspace: &Workspace, name: &str) -> Result<()> {
    let (file, ptx_file) = (format!("{name}.cu"), format!("{FOLDER}/{name}.ptx"));
    let source = std::fs::read_to_string(workspace.root.join(FOLDER).join(&file))
        .map_err(|e| format!("cannot read {FOLDER}/{file}: {e}"))?;
    let options = CompileOptions {
        arch: Some(ARCH),
        options: vec!["--std=c++17".to_owned()],
        name: Some(file.clone()),
        ..CompileOptions::default()
    };
    let ptx = compile_ptx_with_opts(&source, options).map_err(|e| match e {
        CompileError::CompileError { log, .. } => format!("{file}: {}", log.to_string_lossy()),
        other => format!("{file}: {other}"),
    })?;
    let ptx = ptx.to_src();
    if !ptx.lines().any(|line| line == VERSION) {
        return Err(format!(
            "this NVRTC writes another version than `{VERSION}`: put the one of CUDA 12.3 (such as \
             the wheel nvidia-cuda-nvrtc-cu12 12.3.107) on LD_LIBRARY_PATH"
        ));
    }
    // The crate's tests compare this line with the source.
    let ptx =
        format!("// Made by `cargo xtask ptx` from {file} {:016x}\n{}\n", fnv(&source), ptx.trim());
    std::fs::write(workspace.root.join(&ptx_file), ptx)
        .map_err(|e| format!("cannot write {ptx_file}: {e}"))?;
    println!("wrote {ptx_file}");
    Ok(())
}

/// FNV-1a of a text, as the crate's tests have it.
fn fnv(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
