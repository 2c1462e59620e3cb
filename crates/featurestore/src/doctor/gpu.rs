//! GPUs, for builds that use them.

use super::Section;

pub(super) fn examine() -> Section {
    let mut section = Section::new("gpu");
    section.fact("cuda", "feature cuda not built");
    section
}
