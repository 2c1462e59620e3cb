//! `cargo xtask mooncake-venv`: the released Mooncake wheel, for the tests that need it.

use std::time::Duration;

use crate::{Result, process, workspace::Workspace};

/// What is installed, at exactly these versions.
const PACKAGES: [&str; 2] = ["mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy==2.4.6"];
/// Shared libraries that the wheel needs, by their Debian packages.
const LIBRARIES: &str = "libibverbs1 libnuma1 libcurl4 librdmacm1";
const LIMIT: Duration = Duration::from_secs(5 * 60);

/// Makes `target/mooncake-venv` if it is not there, and checks that the wheel can be imported.
pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    let venv = workspace.target.join("mooncake-venv");
    let python = venv.join("bin/python");
    if !python.exists() {
        let mut make = workspace.command("python3");
        make.args(["-m", "venv"]).arg(&venv);
        step(workspace, make, "making the venv")?;
    }
    let mut install = workspace.command(&python.to_string_lossy());
    install.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]).args(PACKAGES);
    step(workspace, install, "installing the wheel")?;
    let mut import = workspace.command(&python.to_string_lossy());
    import.args(["-c", "import mooncake.engine, mooncake.store"]);
    step(workspace, import, "importing the wheel")
        .map_err(|problem| format!("{problem}; on Debian: apt-get install {LIBRARIES}"))?;
    println!(
        "{} is ready. The tests that need it:\n  cargo test -p mooncake-sys \
         -p transport-mooncake-store --features mooncake-sys/mooncake-python,\
         transport-mooncake-store/mooncake-python -- --ignored",
        venv.display()
    );
    Ok(())
}

fn step(workspace: &Workspace, mut command: std::process::Command, what: &str) -> Result<()> {
    println!("{what}");
    let ended = process::run(&mut command, &workspace.target, LIMIT, |line| println!("{line}"))?;
    match ended.problem() {
        None => Ok(()),
        Some(problem) => Err(format!("{what}: {problem}")),
    }
}
