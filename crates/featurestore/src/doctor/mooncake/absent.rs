//! What is said of Mooncake by a build without it.

use super::Section;
use crate::config::Config;

pub(super) fn examine(_: &Config) -> Section {
    let mut section = Section::new("mooncake");
    section.fact("build", "features mooncake and mooncake-python not built").advise_if(
        true,
        "build with --features mooncake-python for the wheel, or mooncake for a C library",
    );
    section
}
