//! Where a library was looked for, and why each place did not do.

use std::{
    ffi::OsString,
    fmt,
    path::{Path, PathBuf},
};

use transport_core::{Error, ErrorKind};

/// Every place that was tried, in order, each with what became of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Search {
    places: Vec<(String, String)>,
}

impl Search {
    /// Notes a place that did not do.
    pub fn missed(&mut self, place: impl fmt::Display, why: impl fmt::Display) {
        self.places.push((place.to_string(), why.to_string()));
    }

    /// The places and the reasons.
    pub fn places(&self) -> &[(String, String)] {
        &self.places
    }

    /// The error of a search without result.
    pub fn error(
        &self,
        operation: &'static str,
        what: &'static str,
        remedy: &'static str,
    ) -> Error {
        Error::new(ErrorKind::NotFound, operation, format!("no usable {what}"))
            .with("tried", self)
            .remedy(remedy)
    }
}

impl fmt::Display for Search {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (place, why)) in self.places.iter().enumerate() {
            write!(f, "{}{place}: {why}", if i == 0 { "" } else { " | " })?;
        }
        Ok(())
    }
}

/// Directories that may hold an installed `mooncake` package: of `venv` if given, else of the
/// environments that the variables name.
pub(crate) fn site_packages(venv: Option<&Path>) -> Vec<PathBuf> {
    let named = |variable: &str| std::env::var_os(variable).filter(|v: &OsString| !v.is_empty());
    let roots: Vec<PathBuf> = match venv {
        Some(venv) => vec![venv.into()],
        None => [VENV_VARIABLE, "VIRTUAL_ENV", "CONDA_PREFIX"]
            .iter()
            .filter_map(|v| named(v).map(PathBuf::from))
            .collect(),
    };
    let mut found = Vec::new();
    for root in roots {
        if root.join("mooncake").is_dir() {
            found.push(root); // a directory of packages itself
            continue;
        }
        for lib in ["lib", "lib64"] {
            let Ok(entries) = std::fs::read_dir(root.join(lib)) else { continue };
            let mut versions: Vec<_> = entries
                .flatten()
                .filter(|e| e.file_name().to_string_lossy().starts_with("python3"))
                .map(|e| e.path().join("site-packages"))
                .filter(|p| p.join("mooncake").is_dir() && !is_listed(&found, p))
                .collect();
            versions.sort();
            found.append(&mut versions);
        }
    }
    found
}

/// Names a virtual environment, or a directory of packages, with Mooncake in it.
pub(crate) const VENV_VARIABLE: &str = "FEATURESTORE_MOONCAKE_VENV";

fn is_listed(found: &[PathBuf], path: &Path) -> bool {
    let same = |a: &Path, b: &Path| match (a.canonicalize(), b.canonicalize()) {
        (Ok(a), Ok(b)) => a == b, // lib64 is often a link to lib
        _ => a == b,
    };
    found.iter().any(|f| same(f, path))
}

/// The package that put `mooncake` into a directory of packages, and its version, from the name of
/// its `dist-info` directory. `None` unless there is exactly one.
pub(crate) fn distribution(site_packages: &Path) -> Option<(String, String)> {
    let entries = std::fs::read_dir(site_packages).ok()?;
    let mut found = entries.flatten().filter_map(|entry| {
        let name = entry.file_name();
        let (package, version) = name.to_str()?.strip_suffix(".dist-info")?.rsplit_once('-')?;
        package.contains("mooncake").then(|| (package.replace('_', "-"), version.to_owned()))
    });
    let first = found.next()?;
    found.next().is_none().then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_are_found_in_environments_and_their_version_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let packages = dir.path().join("lib/python3.11/site-packages");
        std::fs::create_dir_all(packages.join("mooncake")).unwrap();
        assert_eq!(site_packages(Some(dir.path())), std::slice::from_ref(&packages));
        assert_eq!(site_packages(Some(&packages)), std::slice::from_ref(&packages), "directly");
        assert_eq!(distribution(&packages), None);
        std::fs::create_dir(packages.join("mooncake_transfer_engine-0.3.14.dist-info")).unwrap();
        assert_eq!(
            distribution(&packages),
            Some(("mooncake-transfer-engine".into(), "0.3.14".into()))
        );
        std::fs::create_dir(packages.join("other_mooncake-1.dist-info")).unwrap();
        assert_eq!(distribution(&packages), None, "two packages share the folder");
        assert!(site_packages(Some(Path::new("/nonexistent"))).is_empty());
    }

    #[test]
    fn the_error_names_every_place() {
        let mut search = Search::default();
        search.missed("the option", "not given");
        search.missed("/x/liby.so", "no such file");
        let error = search.error("load", "library", "install it");
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert_eq!(
            error.context("tried"),
            Some("the option: not given | /x/liby.so: no such file")
        );
    }
}
