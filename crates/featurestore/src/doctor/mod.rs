//! What this machine can do, and whether the configured transport can be used here.
//!
//! Transports are judged by the same probe that chooses one; what else stands in the report
//! explains its answers.

#[cfg_attr(not(feature = "cuda"), path = "gpu/absent.rs")]
mod gpu;
mod machine;
#[cfg_attr(not(feature = "store"), path = "mooncake/absent.rs")]
mod mooncake;

use std::fmt;

use serde::Serialize;
use serde_json::{Map, Value};
use transport_core::SessionName;

use crate::{
    choose::{self, Candidate, Scope},
    config::Config,
};

/// Everything that was found.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Findings {
    /// The transport that the configuration asks for.
    pub configured: String,
    /// The one that would be used.
    pub chosen: Option<String>,
    /// Why none would be used.
    pub problem: Option<String>,
    /// Why a server that was named could not be asked, or what is not known of one that is silent.
    pub unreachable: Option<String>,
    /// Every transport, best first.
    pub transports: Vec<Candidate>,
    /// Facts by subject.
    pub sections: Vec<Section>,
}

/// Facts about one subject.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Section {
    /// The subject.
    pub subject: &'static str,
    /// What was found, in order.
    pub facts: Vec<Fact>,
}

/// One thing that was found.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Fact {
    /// What it is about.
    pub name: String,
    /// What was found; bytes are numbers.
    pub value: Value,
    /// What to do about it, if something should be done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
}

/// Looks at this machine and asks `servers`, given by their control addresses. Nothing is left
/// connected or running. Blocks, for some seconds at most.
pub fn examine(config: &Config, servers: &[SessionName]) -> Findings {
    let survey = choose::survey(config, servers, Scope::Everything);
    let transports = survey.candidates.clone();
    let unreachable = survey.unreachable.as_ref().map(ToString::to_string);
    let unreachable = unreachable.or_else(|| survey.silent.clone());
    let (chosen, problem) = match choose::decide(config, survey) {
        Ok((_, choice)) => (Some(choice.chosen), None),
        Err(error) => (None, Some(error.to_string())),
    };
    Findings {
        configured: config.transport.to_string(),
        chosen,
        problem,
        unreachable,
        transports,
        sections: vec![machine::examine(), mooncake::examine(config), gpu::examine(config.device)],
    }
}

impl Findings {
    /// Whether the configured transport can be used, and every server that was named answers.
    pub fn is_usable(&self) -> bool {
        self.chosen.is_some() && self.unreachable.is_none()
    }
}

impl fmt::Display for Findings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for section in &self.sections {
            writeln!(f, "{}", section.subject)?;
            for fact in &section.facts {
                writeln!(f, "  {:<20} {}", fact.name, shown(&fact.value))?;
                if let Some(advice) = &fact.advice {
                    writeln!(f, "  {:<20} ! {advice}", "")?;
                }
            }
            writeln!(f)?;
        }
        let chosen = self.chosen.clone().unwrap_or_default();
        let choice = choose::Choice { candidates: self.transports.clone(), chosen };
        writeln!(f, "{choice}\n")?;
        if let (Some(why), Some(_)) = (&self.unreachable, &self.chosen) {
            writeln!(f, "a server cannot be asked: {why}")?;
        }
        match (&self.chosen, &self.problem) {
            (Some(chosen), _) => write!(f, "configured: {}; used: {chosen}", self.configured),
            (None, Some(problem)) => write!(f, "configured: {}; {problem}", self.configured),
            (None, None) => write!(f, "configured: {}", self.configured),
        }
    }
}

/// A value as a person reads it.
fn shown(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::Bool(yes) => if *yes { "yes" } else { "no" }.to_owned(),
        Value::String(text) => text.clone(),
        Value::Array(items) if items.is_empty() => "none".to_owned(),
        Value::Array(items) => items.iter().map(shown).collect::<Vec<_>>().join(", "),
        Value::Object(fields) => {
            let field = |(name, value): (&String, &Value)| format!("{name} {}", shown(value));
            fields.iter().map(field).collect::<Vec<_>>().join(" ")
        }
        number => number.to_string(),
    }
}

impl Section {
    fn new(subject: &'static str) -> Self {
        Self { subject, facts: Vec::new() }
    }

    fn fact(&mut self, name: impl Into<String>, value: impl Into<Value>) -> &mut Fact {
        self.facts.push(Fact { name: name.into(), value: value.into(), advice: None });
        self.facts.last_mut().expect("just added")
    }
}

impl Fact {
    /// Adds what to do, if `wrong`.
    fn advise_if(&mut self, wrong: bool, advice: impl Into<String>) {
        if wrong {
            self.advice = Some(advice.into());
        }
    }
}

/// An object of named values, for facts with several.
fn fields<const N: usize>(pairs: [(&str, Value); N]) -> Value {
    Value::Object(pairs.into_iter().map(|(name, v)| (name.to_owned(), v)).collect::<Map<_, _>>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TransportChoice;

    #[test]
    fn a_machine_without_servers_is_examined_by_itself() {
        let findings = examine(&Config::default(), &[]);
        assert!(findings.is_usable(), "{findings}");
        let names: Vec<_> = findings.transports.iter().map(|c| c.scheme.as_str()).collect();
        assert_eq!(names, ["nvlink_intra", "nvlink", "shm", "tcp", "store", "mooncake"]);
        assert!(findings.transports.iter().all(|c| !c.reason.is_empty()));
        let json = serde_json::to_value(&findings).unwrap();
        assert_eq!(json["configured"], "auto");
        let subjects: Vec<_> = findings.sections.iter().map(|s| s.subject).collect();
        assert_eq!(subjects, ["machine", "mooncake", "gpu"]);
        let text = findings.to_string();
        for part in ["memlock", "shm", "huge pages", "network", "suitable", "configured: auto"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn a_transport_that_cannot_be_used_is_no_success() {
        let config = Config::default().transport(TransportChoice::Store);
        let findings = examine(&config, &[]);
        assert!(!findings.is_usable(), "no master is named: {findings}");
        assert!(findings.problem.as_ref().is_some_and(|p| p.contains("store")), "{findings}");
        let nobody = ["127.0.0.1:1".parse().unwrap()];
        let findings = examine(&Config::default(), &nobody);
        assert!(!findings.is_usable(), "{findings}");
        assert!(findings.to_string().contains("127.0.0.1:1"), "{findings}");
    }
}
