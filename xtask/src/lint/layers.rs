//! Who may depend on whom: the picture of the README, as a table.

use crate::workspace::Member;

const CORE: &[&str] = &["transport-core"];
const SHARED: &[&str] = &["capture-arena", "control-proto", "mooncake-sys", "transport-core"];
const ALL: &[&str] = &[
    "capture-arena",
    "control-proto",
    "featurestore",
    "mooncake-sys",
    "rollout-codec",
    "transport-core",
    "transport-mooncake-direct",
    "transport-mooncake-store",
];

/// Package, and the members that it may name in any of its dependency tables.
///
/// Dependencies of tests count: a crate whose tests need what stands above it cannot be understood,
/// or published, from below.
const LAYERS: &[(&str, &[&str])] = &[
    ("transport-core", &[]),
    ("control-proto", CORE),
    ("capture-arena", CORE),
    ("mooncake-sys", CORE),
    ("transport-mooncake-direct", SHARED),
    ("transport-mooncake-store", SHARED),
    ("rollout-codec", SHARED),
    (
        "featurestore",
        &[
            "capture-arena",
            "control-proto",
            "mooncake-sys",
            "rollout-codec",
            "transport-core",
            "transport-mooncake-direct",
            "transport-mooncake-store",
        ],
    ),
    ("featurestore-benches", ALL),
    ("featurestore-tests", ALL),
    ("xtask", &[]),
];

/// Names every arrow that the table does not have, and every member without a row.
pub(super) fn check(members: &[Member]) -> Vec<String> {
    let mut problems = Vec::new();
    for member in members {
        let Some((_, allowed)) = LAYERS.iter().find(|(name, _)| *name == member.name) else {
            problems.push(format!(
                "{}: not in the table of layers; add it to xtask/src/lint/layers.rs and the README",
                member.name
            ));
            continue;
        };
        for dependency in &member.dependencies {
            let is_member = members.iter().any(|other| other.name == dependency.name);
            if (is_member || dependency.is_local) && !allowed.contains(&dependency.name.as_str()) {
                problems.push(format!(
                    "{}: must not depend on {}; arrows point down only, see the README",
                    member.name, dependency.name
                ));
            }
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::Dependency;

    fn member(name: &str, dependencies: &[(&str, bool)]) -> Member {
        Member {
            name: name.to_owned(),
            folder: name.into(),
            license: None,
            rust_version: None,
            is_default: true,
            dependencies: dependencies
                .iter()
                .map(|&(name, is_local)| Dependency { name: name.to_owned(), is_local })
                .collect(),
            benches: Vec::new(),
            tests: Vec::new(),
            features: std::collections::BTreeSet::new(),
        }
    }

    #[test]
    fn arrows_down_pass() {
        let members = [
            member("transport-core", &[("serde", false)]),
            member("capture-arena", &[("transport-core", true), ("parking_lot", false)]),
            member(
                "transport-mooncake-direct",
                &[("capture-arena", true), ("transport-core", true)],
            ),
        ];
        assert_eq!(check(&members), Vec::<String>::new());
    }

    #[test]
    fn arrow_up_is_named() {
        let members = [
            member("transport-core", &[("capture-arena", true)]),
            member("capture-arena", &[("transport-core", true)]),
        ];
        let problems = check(&members);
        assert_eq!(problems.len(), 1);
        assert!(problems[0].starts_with("transport-core: must not depend on capture-arena"));
    }

    #[test]
    fn arrow_out_of_the_workspace_by_path_is_named() {
        let problems = check(&[member("transport-core", &[("somewhere-else", true)])]);
        assert_eq!(problems.len(), 1, "{problems:?}");
    }

    #[test]
    fn member_that_nobody_placed_is_named() {
        let problems = check(&[member("newcomer", &[])]);
        assert!(problems[0].contains("newcomer: not in the table"), "{problems:?}");
    }

    #[test]
    fn table_has_no_circle() {
        // Each row only names rows above it, but for those that name everything.
        for (index, (name, allowed)) in LAYERS.iter().enumerate() {
            for dependency in *allowed {
                let place = LAYERS.iter().position(|(other, _)| other == dependency);
                assert!(place.is_some_and(|place| place < index), "{name} -> {dependency}");
            }
        }
    }
}
