//! What stands in for facts about GPUs in builds that use none.

use super::Section;

pub(super) fn examine(_: u32) -> Section {
    let mut section = Section::new("gpu");
    section.fact("cuda", "built without the feature cuda");
    section
}
