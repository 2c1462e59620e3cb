//! Released builds of Mooncake below the target directory, for the tests that need a real one.
//!
//! Three of them, because no single one shows everything: the pinned wheel, the next generation of
//! the wheel, whose packages are laid out differently, and a redistribution that carries the store's
//! C library. A fourth, with torch, is used where a variable names it. What cannot be had here is reported with the reason, never passed over.

use std::{
    env, fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use crate::{Result, process, workspace::Workspace};

/// The wheel that everything is measured against.
const PINNED: [&str; 2] = ["mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy==2.4.6"];
/// The next generation; it exists for CUDA only, and loads without a GPU.
const NEXT: [&str; 3] =
    ["mooncake-transfer-engine-cuda13==0.3.14", "nvidia-cuda-runtime==13.5.37", "numpy==2.4.6"];
/// Carries `libmooncake_store.so`. It shares the package folder of the wheels, so it lies aside.
const STORE_LIBRARY: [&str; 2] =
    ["tokenspeed-mooncake==0.3.13.post20261027", "nvidia-cuda-runtime==13.5.37"];
/// Shared libraries that these need, and the Debian packages that bring them.
const LIBRARIES: [(&str, &str); 5] = [
    ("libibverbs.so.1", "libibverbs1"),
    ("libnuma.so.1", "libnuma1"),
    ("libcurl.so.4", "libcurl4"),
    ("librdmacm.so.1", "librdmacm1"),
    ("libmlx5.so.1", "ibverbs-providers"),
];
/// Longest installation of one of them.
const LIMIT: Duration = Duration::from_secs(3 * 60);

/// Where the tests find them, or why they do not.
#[derive(Debug)]
pub(crate) struct Mooncake {
    pub(crate) parts: [Part; 4],
}

/// One of the builds.
#[derive(Debug)]
pub(crate) struct Part {
    /// Tests read the directory from here.
    pub(crate) variable: &'static str,
    /// The directory, or why there is none.
    pub(crate) found: Result<PathBuf>,
}

impl Mooncake {
    /// Finds or installs all of them. A variable that is set already is taken as it is.
    pub(crate) fn prepare(workspace: &Workspace) -> Self {
        let mut needed = None;
        let mut part = |variable, make: &dyn Fn() -> Result<PathBuf>| {
            let named = env::var_os(variable).filter(|value| !value.is_empty());
            let found = match named {
                Some(path) => Ok(PathBuf::from(path)),
                None => {
                    needed.get_or_insert_with(|| libraries(workspace)).clone().and_then(|()| make())
                }
            };
            Part { variable, found }
        };
        Self {
            parts: [
                part(VENV, &|| {
                    venv(
                        workspace,
                        "mooncake-venv",
                        &PINNED,
                        "import mooncake.engine, mooncake.store",
                    )
                }),
                // It imports only where a CUDA driver or a stand-in is loaded first.
                part(NEXT_VENV, &|| venv(workspace, "mooncake-next-venv", &NEXT, "import numpy")),
                part(STORE_DIR, &|| store_library(workspace)),
                // Too large to be installed by the way.
                part(TORCH_VENV, &|| {
                    Err(format!("{TORCH_VENV} names no venv with {}, msgpack and torch", PINNED[0]))
                }),
            ],
        }
    }

    /// What the tests look at.
    pub(crate) fn variables(&self) -> impl Iterator<Item = (&'static str, &Path)> {
        self.parts.iter().filter_map(|part| Some((part.variable, part.found.as_deref().ok()?)))
    }

    /// The first reason why a test that is ignored as `why` cannot run here, or `None` if it can.
    /// Every test of this kind needs the pinned wheel, and those that name a variable that too.
    pub(crate) fn obstacle(&self, why: &str) -> Option<&str> {
        self.parts
            .iter()
            .filter(|part| part.variable == VENV || why.contains(part.variable))
            .find_map(|part| part.found.as_ref().err().map(String::as_str))
    }
}

const VENV: &str = "FEATURESTORE_MOONCAKE_VENV";
const NEXT_VENV: &str = "FEATURESTORE_MOONCAKE_NEXT_VENV";
const STORE_DIR: &str = "FEATURESTORE_STORE_LIBRARY_DIR";
const TORCH_VENV: &str = "FEATURESTORE_TORCH_VENV";

/// `cargo xtask mooncake-venv`: installs all and says how to run what needs them.
pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    let mooncake = Mooncake::prepare(workspace);
    let mut missing = Vec::new();
    for part in &mooncake.parts {
        match &part.found {
            Ok(path) => println!("export {}={}", part.variable, path.display()),
            Err(why) if part.variable == TORCH_VENV => println!("not made here: {why}"),
            Err(why) => missing.push(format!("{}: {why}", part.variable)),
        }
    }
    println!("`cargo xtask test` runs the tests that need them.");
    if missing.is_empty() { Ok(()) } else { Err(missing.join("\n")) }
}

/// Sees to the shared libraries; installs them where this is root on a Debian.
fn libraries(workspace: &Workspace) -> Result<()> {
    let missing = missing_libraries(workspace)?;
    if missing.is_empty() {
        return Ok(());
    }
    let packages: Vec<&str> = LIBRARIES
        .iter()
        .filter(|(library, _)| missing.iter().any(|name| name == library))
        .map(|(_, package)| *package)
        .collect();
    let by_hand = format!(
        "missing {}; on Debian: apt-get install {}",
        missing.join(", "),
        packages.join(" ")
    );
    if !rustix::process::geteuid().is_root() {
        return Err(by_hand);
    }
    let install = || {
        let mut command = workspace.command("apt-get");
        command.env("DEBIAN_FRONTEND", "noninteractive");
        command.args(["install", "--yes", "--no-install-recommends"]).args(&packages);
        step(workspace, command, "installing the libraries that Mooncake needs")
    };
    // The lists of packages are often missing or old; fetch them only where that is so.
    install()
        .or_else(|_| {
            let mut update = workspace.command("apt-get");
            update.args(["--quiet", "update"]);
            step(workspace, update, "fetching the lists of packages").and_then(|()| install())
        })
        .map_err(|problem| format!("{by_hand} ({problem})"))?;
    let missing = missing_libraries(workspace)?;
    if missing.is_empty() { Ok(()) } else { Err(by_hand) }
}

/// Asks the loader through Python, which the wheels need anyway.
fn missing_libraries(workspace: &Workspace) -> Result<Vec<String>> {
    const ASK: &str = "\
import ctypes, sys
for name in sys.argv[1:]:
    try: ctypes.CDLL(name)
    except OSError: print(name)";
    let mut python = workspace.command("python3");
    python.args(["-c", ASK]).args(LIBRARIES.map(|(library, _)| library));
    Ok(process::output(&mut python)?.lines().map(str::to_owned).collect())
}

/// A virtual environment with exactly these packages, which `check` proves.
fn venv(workspace: &Workspace, name: &str, packages: &[&str], check: &str) -> Result<PathBuf> {
    let venv = workspace.target.join(name);
    let python = venv.join("bin/python");
    install_once(&venv, packages, || {
        let mut make = workspace.command("python3");
        make.args(["-m", "venv"]).arg(&venv);
        step(workspace, make, &format!("making {name}"))?;
        let mut pip = workspace.command(&python.to_string_lossy());
        pip.args(PIP).args(packages);
        step(workspace, pip, &format!("installing {}", packages.join(" ")))
    })?;
    let mut import = workspace.command(&python.to_string_lossy());
    import.args(["-c", check]);
    process::output(&mut import)?;
    let mut embed = workspace.command(&python.to_string_lossy());
    embed.args(["-c", EMBEDDABLE]);
    process::output(&mut embed).map_err(
        |_| "this Python has no shared library; on Debian: apt-get install libpython3-dev",
    )?;
    Ok(venv)
}

/// `libpython` is looked for beside this Python, then by the loader.
const EMBEDDABLE: &str = "\
import ctypes, sys
name = 'libpython%d.%d.so.1.0' % sys.version_info[:2]
try: ctypes.CDLL(sys.base_prefix + '/lib/' + name)
except OSError: ctypes.CDLL(name)";

/// Tries a little, and says soon that there is no network.
const PIP: [&str; 8] = [
    "-m",
    "pip",
    "install",
    "--quiet",
    "--disable-pip-version-check",
    "--no-input",
    "--retries=2",
    "--timeout=15",
];

fn store_library(workspace: &Workspace) -> Result<PathBuf> {
    let folder = workspace.target.join("mooncake-store-library");
    install_once(&folder, &STORE_LIBRARY, || {
        let mut pip = workspace.command("python3");
        pip.args(PIP).args(["--root-user-action=ignore", "--no-deps", "--target"]).arg(&folder);
        pip.args(STORE_LIBRARY);
        step(workspace, pip, &format!("unpacking {}", STORE_LIBRARY.join(" ")))?;
        // The tests open it by path: nothing that is installed here leads the loader to it.
        symlink("nvidia/cu13/lib/libcudart.so.13", folder.join("libcudart.so.13"))
            .map_err(|error| format!("cannot link libcudart.so.13: {error}"))
    })?;
    for file in ["mooncake/libmooncake_store.so", "libcudart.so.13"] {
        if !folder.join(file).exists() {
            return Err(format!("{} holds no {file}", STORE_LIBRARY.join(" ")));
        }
    }
    Ok(folder)
}

/// Runs `install` unless the folder says that these packages lie in it. What an earlier or broken
/// installation left is removed first.
fn install_once(
    folder: &Path,
    packages: &[&str],
    install: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let note = folder.join("installed.txt");
    let packages = packages.join("\n") + "\n";
    if fs::read_to_string(&note).is_ok_and(|installed| installed == packages) {
        return Ok(());
    }
    if folder.exists() {
        fs::remove_dir_all(folder)
            .map_err(|error| format!("cannot remove {}: {error}", folder.display()))?;
    }
    install()?;
    fs::write(&note, packages).map_err(|error| format!("cannot write {}: {error}", note.display()))
}

fn step(workspace: &Workspace, mut command: Command, what: &str) -> Result<()> {
    println!("{what}");
    let mut last = String::new();
    let ended = process::run(&mut command, &workspace.target, LIMIT, |line| {
        println!("{line}");
        if !line.trim().is_empty() {
            last = line.trim().to_owned();
        }
    })?;
    match ended.problem() {
        None => Ok(()),
        Some(problem) if last.is_empty() => Err(format!("{what}: {problem}")),
        Some(problem) => Err(format!("{what}: {problem}: {last}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mooncake(found: [Result<&str, &str>; 4]) -> Mooncake {
        let mut variables = [VENV, NEXT_VENV, STORE_DIR, TORCH_VENV].into_iter();
        Mooncake {
            parts: found.map(|found| Part {
                variable: variables.next().unwrap(),
                found: found.map(PathBuf::from).map_err(str::to_owned),
            }),
        }
    }

    #[test]
    fn a_test_runs_where_all_that_it_names_is_here() {
        let some = mooncake([Ok("/venv"), Err("no such wheel"), Ok("/store"), Err("no")]);
        assert_eq!(some.obstacle("needs a Mooncake venv: how"), None);
        let next = format!("needs a Mooncake venv and {NEXT_VENV}, a venv");
        assert_eq!(some.obstacle(&next), Some("no such wheel"));
        assert_eq!(some.obstacle(&format!("needs a Mooncake venv and {STORE_DIR}")), None);
        assert_eq!(some.variables().count(), 2);
        let none = mooncake([Err("no python3"), Ok("/next"), Ok("/store"), Ok("/torch")]);
        assert_eq!(none.obstacle(&next), Some("no python3"));
    }

    #[test]
    fn an_installation_is_made_once_and_again_when_it_is_another() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("venv");
        let make = || fs::create_dir(&folder).map_err(|error| error.to_string());
        install_once(&folder, &["a==1"], make).unwrap();
        install_once(&folder, &["a==1"], || Err("made twice".into())).unwrap();
        install_once(&folder, &["a==2"], make).unwrap();
        let broken = install_once(&folder, &["a==3"], || Err("no network".into()));
        assert_eq!(broken, Err("no network".into()));
        install_once(&folder, &["a==3"], make).unwrap();
    }
}
