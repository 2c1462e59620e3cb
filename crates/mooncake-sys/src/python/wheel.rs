//! Where the wheel and its Python are.

use std::path::{Path, PathBuf};

use transport_core::{Error, ErrorKind, Result};

use crate::{ProviderInfo, ProviderKind, Search, search};

const FIND: &str = "find Mooncake wheel";

/// Where to look, and how many threads run the interpreter.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WheelOptions {
    /// Virtual environment or directory of packages; searched for if `None`.
    pub environment: Option<PathBuf>,
    /// Shared library of the interpreter; searched for if `None`.
    pub libpython: Option<PathBuf>,
    /// Libraries to open before the wheel's, in order, because the loader would not find them: pip
    /// keeps `libcudart.so.13` where only Python looks, for example.
    pub preload: Vec<PathBuf>,
    /// Threads that run the interpreter, 1 to 8: how many calls may be inside Mooncake at once. One
    /// more than move payload at a time, so that a read that hangs does not keep the others from
    /// being asked why.
    pub threads: usize,
}

impl Default for WheelOptions {
    fn default() -> Self {
        Self { environment: None, libpython: None, preload: Vec::new(), threads: 5 }
    }
}

impl WheelOptions {
    /// Looks only here.
    pub fn at(environment: impl Into<PathBuf>) -> Self {
        Self { environment: Some(environment.into()), ..Self::default() }
    }

    /// Opens another library first.
    #[must_use]
    pub fn preload(mut self, path: impl Into<PathBuf>) -> Self {
        self.preload.push(path.into());
        self
    }

    /// Sets the number of threads.
    #[must_use]
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = threads;
        self
    }
}

/// An installed wheel.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Wheel {
    /// Directory of packages that holds `mooncake`.
    pub packages: PathBuf,
    /// Version of Python that it is installed for, such as `3.11`.
    pub python: String,
    /// Name and version of the distribution, if there is exactly one.
    pub distribution: Option<(String, String)>,
    /// The environment's own `python`, from whose place the interpreter finds its library.
    pub(crate) program: Option<PathBuf>,
    /// Shared libraries of the interpreter to try, best first.
    pub(crate) libpython: Vec<PathBuf>,
}

impl Wheel {
    /// Finds the wheel, without running anything.
    pub fn find(options: &WheelOptions) -> Result<Self> {
        let mut search = Search::default();
        let found = search::site_packages(options.environment.as_deref());
        for packages in found {
            match Self::at(&packages, options) {
                Ok(wheel) => return Ok(wheel),
                Err(why) => search.missed(packages.display(), why),
            }
        }
        match &options.environment {
            Some(path) => search.missed(path.display(), "no mooncake package below it"),
            None => search.missed(
                "FEATURESTORE_MOONCAKE_VENV, VIRTUAL_ENV, CONDA_PREFIX",
                "none names an environment with a mooncake package",
            ),
        }
        Err(search.error(
            FIND,
            "installed Mooncake wheel",
            "install one of Mooncake's wheels in a virtual environment and name that",
        ))
    }

    fn at(packages: &Path, options: &WheelOptions) -> Result<Self, String> {
        // <root>/lib/python3.11/site-packages
        let lib = packages.parent().ok_or("a directory of packages lies in another one")?;
        let python = lib
            .file_name()
            .and_then(|n| n.to_str())
            .and_then(|n| n.strip_prefix("python"))
            .filter(|v| v.starts_with("3."))
            .ok_or("the directory above is not called python3.N, so the version is unknown")?
            .to_owned();
        let root = lib.parent().and_then(Path::parent);
        let program = root.map(|r| r.join("bin/python")).filter(|p| p.exists());
        let name = format!("libpython{python}.so");
        let mut libpython: Vec<PathBuf> = match &options.libpython {
            Some(path) => vec![path.clone()],
            None => {
                let base = root.and_then(base_of).or_else(|| root.map(Path::to_path_buf));
                let own = base.map(|b| b.join("lib"));
                own.into_iter()
                    .flat_map(|lib| [lib.join(format!("{name}.1.0")), lib.join(&name)])
                    .filter(|p| p.exists())
                    .collect()
            }
        };
        if options.libpython.is_none() {
            libpython.push(format!("{name}.1.0").into()); // in the loader's path
        }
        Ok(Self {
            packages: packages.into(),
            python,
            distribution: search::distribution(packages),
            program,
            libpython,
        })
    }

    /// Describes one of the wheel's modules as the provider of calls.
    pub(crate) fn info(&self, file: &str) -> ProviderInfo {
        let version = self
            .distribution
            .as_ref()
            .map(|(name, version)| format!("{version} [{name}, Python {}]", self.python));
        ProviderInfo::new(ProviderKind::Wheel, file).version(version)
    }

    pub(crate) fn check_threads(threads: usize) -> Result<()> {
        if (1..=8).contains(&threads) {
            return Ok(());
        }
        Err(Error::new(ErrorKind::ConfigInvalid, FIND, "the interpreter runs on 1 to 8 threads")
            .with("threads", threads))
    }
}

/// Installation that a virtual environment was made from, by its `pyvenv.cfg`.
fn base_of(root: &Path) -> Option<PathBuf> {
    let text = std::fs::read_to_string(root.join("pyvenv.cfg")).ok()?;
    let home = text.lines().find_map(|line| {
        let (name, value) = line.split_once('=')?;
        (name.trim() == "home").then(|| value.trim().to_owned())
    })?;
    Path::new(&home).parent().map(Path::to_path_buf) // home is the bin directory
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_virtual_environment_leads_to_its_python() {
        let dir = tempfile::tempdir().unwrap();
        let (venv, base) = (dir.path().join("venv"), dir.path().join("base"));
        let packages = venv.join("lib/python3.12/site-packages");
        std::fs::create_dir_all(packages.join("mooncake")).unwrap();
        std::fs::create_dir_all(packages.join("mooncake_transfer_engine-0.3.14.dist-info"))
            .unwrap();
        std::fs::create_dir_all(venv.join("bin")).unwrap();
        std::fs::write(venv.join("bin/python"), "").unwrap();
        std::fs::create_dir_all(base.join("lib")).unwrap();
        std::fs::write(base.join("lib/libpython3.12.so.1.0"), "").unwrap();
        let home = base.join("bin");
        std::fs::write(venv.join("pyvenv.cfg"), format!("a = b\nhome = {}\n", home.display()))
            .unwrap();
        let wheel = Wheel::find(&WheelOptions::at(&venv)).unwrap();
        assert_eq!((wheel.python.as_str(), &wheel.packages), ("3.12", &packages));
        assert_eq!(wheel.program.as_deref(), Some(venv.join("bin/python").as_path()));
        assert_eq!(
            wheel.libpython,
            [base.join("lib/libpython3.12.so.1.0"), "libpython3.12.so.1.0".into()]
        );
        let version = wheel.info("x").version.unwrap();
        assert_eq!(version, "0.3.14 [mooncake-transfer-engine, Python 3.12]");
    }

    #[test]
    fn a_missing_wheel_says_where_it_was_looked_for() {
        let error = Wheel::find(&WheelOptions::at("/nonexistent/venv")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(error.context("tried").unwrap().contains("/nonexistent/venv"), "{error}");
    }
}
