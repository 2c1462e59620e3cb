//! One captured sample, in any of the four forms.

use indexmap::IndexMap;
use transport_core::{
    ArenaLocation, ClientId, Descriptor, Dtype, Epoch, Error, ErrorKind, FeatureDescriptor,
    FeatureName, Generation, Location, RemoteAddr, Result, SampleId, SampleKey, Sequence,
    SessionName, TensorMeta, TokenLocation,
};

use super::{Faults, Limits};
use crate::json::{RawObject, bounded_list, write_number, write_string, write_value};

const READ: Faults = Faults { kind: ErrorKind::Protocol, operation: "read capture result" };

/// Longest text of a failure that is kept, in bytes.
const MAX_FAILURE_BYTES: usize = 64 << 10;

/// What became of one requested sample.
#[derive(Clone, Debug, PartialEq)]
pub enum CaptureOutcome {
    /// It is published.
    Captured(Descriptor),
    /// It was not captured.
    Failed {
        /// The sample that was asked for.
        sample_id: SampleId,
        /// Why, in the server's words.
        error: String,
        /// Whether another attempt may succeed.
        retryable: bool,
        /// What kept it from being captured, if the server says.
        cause: Option<FailureCause>,
    },
}

/// What kept a sample from being captured, for those who send the request again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureCause {
    /// There was no room for it as long as the request had patience.
    NoRoom,
    /// There may have been room, but requests that came before waited for some.
    Queued,
    /// Something else, which is for people to read.
    Other,
}

impl FailureCause {
    const ALL: [Self; 3] = [Self::NoRoom, Self::Queued, Self::Other];

    /// Its name on the wire.
    pub const fn name(self) -> &'static str {
        match self {
            Self::NoRoom => "no_room",
            Self::Queued => "queued",
            Self::Other => "other",
        }
    }

    /// None for a name that a newer server may use.
    fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|cause| cause.name() == name)
    }
}

impl CaptureOutcome {
    /// The sample that it is about.
    pub fn sample_id(&self) -> &SampleId {
        match self {
            Self::Captured(descriptor) => &descriptor.sample.sample_id,
            Self::Failed { sample_id, .. } => sample_id,
        }
    }
}

/// Reads a result: any of the four forms, or a failure. Unknown fields are ignored.
pub fn parse_result(json: &str, limits: &Limits) -> Result<CaptureOutcome> {
    let object = RawObject::parse(json).map_err(|fault| READ.object(fault))?;
    if object.get("error").is_some() {
        let mut error = READ.text(&object, "error")?;
        if error.len() > MAX_FAILURE_BYTES {
            error = error.chars().take(MAX_FAILURE_BYTES / 4).collect();
        }
        let sample_id = READ.parse(&object, "sample_id")?;
        let cause = match object.get("cause") {
            Some(_) => FailureCause::named(&READ.text(&object, "cause")?),
            None => None,
        };
        return Ok(CaptureOutcome::Failed { sample_id, error, retryable: true, cause });
    }
    let sample = SampleKey::new(
        READ.parse(&object, "store_id")?,
        READ.parse(&object, "sample_id")?,
        Generation(object.field("gen").map_err(|field| READ.field(field))?),
    );
    parse_descriptor(&object, sample.clone(), limits)
        .map(CaptureOutcome::Captured)
        .map_err(|error| error.with("sample", &sample))
}

fn parse_descriptor(
    object: &RawObject<'_>,
    sample: SampleKey,
    limits: &Limits,
) -> Result<Descriptor> {
    let location = parse_location(object)?;
    let raw = object.get("features").ok_or_else(|| READ.missing("features"))?;
    let raw = READ.object_at(raw, "features")?;
    if raw.len() == 0 || raw.len() > limits.features {
        return Err(READ
            .error("the number of tensors is out of range")
            .with("found", raw.len())
            .with("max", limits.features));
    }
    let mut features = IndexMap::with_capacity(raw.len());
    for (name, raw) in raw.iter() {
        let feature = parse_feature(raw, &location)
            .map_err(|e| e.with("feature", format_args!("{:?}", super::shortened(name))))?;
        features.insert(FeatureName::new(name)?, feature);
    }
    checked_nbytes(features.values().map(|f| &f.meta), READ)?;
    let aux_layer_ids = match object.get("aux_layer_ids") {
        Some(raw) => {
            Some(bounded_list(raw, 1024).map_err(|fault| READ.list("aux_layer_ids", fault))?)
        }
        None => None,
    };
    Descriptor::new(sample, features, aux_layer_ids, location)
}

/// The sum of the sizes, if it fits in 63 bits.
pub(crate) fn checked_nbytes<'a>(
    metas: impl IntoIterator<Item = &'a TensorMeta>,
    faults: Faults,
) -> Result<u64> {
    metas
        .into_iter()
        .try_fold(0u64, |sum, meta| sum.checked_add(meta.nbytes()))
        .filter(|&sum| sum <= i64::MAX as u64)
        .ok_or_else(|| faults.error("the size of the sample overflows"))
}

fn parse_location(object: &RawObject<'_>) -> Result<Location> {
    let (arena, nvlink) = (object.get("arena"), object.get("nvlink"));
    let token = ["session_id", "control_endpoint", "control_token", "transport"]
        .iter()
        .any(|field| object.get(field).is_some());
    match (arena.or(nvlink), token) {
        (None, false) => Ok(Location::Store),
        (None, true) => parse_token_location(object).map(Location::Token),
        (Some(raw), false) if arena.is_none() || nvlink.is_none() => {
            let arena = READ.object_at(raw, "arena")?;
            let mut location = ArenaLocation::new(
                READ.parse(&arena, "session")?,
                control_endpoint(&arena, "control", READ)?,
                object.optional::<Epoch>("epoch").map_err(|field| READ.field(field))?,
            );
            if arena.get("holder").is_some() {
                location.holder = Some(READ.parse::<ClientId>(&arena, "holder")?);
            }
            Ok(Location::Arena(location))
        }
        _ => Err(READ.error("the result names two locations")),
    }
}

fn parse_token_location(object: &RawObject<'_>) -> Result<TokenLocation> {
    let token = READ.text(object, "control_token")?;
    if crate::Secret::new(&*token).is_err() {
        return Err(READ.field("control_token"));
    }
    Ok(TokenLocation::new(
        token_transport(&READ.text(object, "transport")?, READ)?,
        READ.parse(object, "session_id")?,
        control_endpoint(object, "control_endpoint", READ)?,
        token,
    ))
}

/// A transport of the token form, by its one name.
pub(crate) fn token_transport(name: &str, faults: Faults) -> Result<&'static str> {
    match name {
        "rdma" => Ok("rdma"),
        "nvlink" | "mnnvl" => Ok("nvlink"),
        "nvlink_intra" => Ok("nvlink_intra"),
        _ => Err(faults
            .error("the transport is unknown")
            .with("found", format_args!("{:?}", super::shortened(name)))
            .remedy("use one of rdma, nvlink, nvlink_intra")),
    }
}

/// A control endpoint, `host:port`; the URLs of an abandoned revision are recognised.
pub(crate) fn control_endpoint(
    object: &RawObject<'_>,
    field: &'static str,
    faults: Faults,
) -> Result<SessionName> {
    let text = faults.text(object, field)?;
    if ["http://", "https://"].iter().any(|scheme| text.starts_with(scheme)) {
        return Err(Error::new(
            ErrorKind::Unsupported,
            faults.operation,
            "the control endpoint is an HTTP address, which only an abandoned revision had",
        )
        .with("field", field)
        .with("found", format_args!("{:?}", super::shortened(&text)))
        .remedy("update the capture server to one whose control endpoint is host:port"));
    }
    text.parse().map_err(|error| faults.unusable(field, error))
}

fn parse_feature(json: &str, location: &Location) -> Result<FeatureDescriptor> {
    let object = RawObject::parse(json).map_err(|fault| READ.object(fault))?;
    let meta = parse_meta(&object, READ)?;
    let optional = |name| object.optional::<u64>(name).map_err(|field| READ.field(field));
    let nbytes = optional("nbytes")?;
    let token = matches!(location, Location::Token(_));
    if nbytes.map_or(token, |found| found != meta.nbytes()) {
        return Err(READ
            .error("nbytes does not fit shape and element type")
            .with("expected", meta.nbytes())
            .with("found", nbytes.map_or_else(|| "nothing".into(), |n| n.to_string())));
    }
    let address = match (optional("address")?, location) {
        (Some(_), Location::Store) => {
            return Err(READ.error("there is an address, but nothing says in which process"));
        }
        (None, Location::Token(_)) => return Err(READ.field("address")),
        (address, _) => address.map(|a| feature_address(a, &meta, READ)).transpose()?,
    };
    Ok(FeatureDescriptor::new(meta, address, optional("seq")?.map(Sequence)))
}

/// An address that is not null and whose range stays in the address space.
pub(crate) fn feature_address(
    address: u64,
    meta: &TensorMeta,
    faults: Faults,
) -> Result<RemoteAddr> {
    let range = RemoteAddr(address).checked_add(meta.nbytes());
    if address == 0 || range.is_none() {
        return Err(faults
            .error("the address is null or its range leaves the address space")
            .with("address", format_args!("{address:#x}"))
            .with("nbytes", meta.nbytes()));
    }
    Ok(RemoteAddr(address))
}

/// `shape` and `dtype` of an object.
pub(crate) fn parse_meta(object: &RawObject<'_>, faults: Faults) -> Result<TensorMeta> {
    let name = faults.text(object, "dtype")?;
    let dtype: Dtype = name.parse().map_err(|error| {
        faults
            .unusable("dtype", error)
            .with("found", format_args!("{:?}", super::shortened(&name)))
            .remedy("use a torch element type, such as bfloat16 or int64")
    })?;
    let raw = object.get("shape").ok_or_else(|| faults.missing("shape"))?;
    let found = || super::shortened(raw);
    let shape: Vec<i64> = bounded_list(raw, TensorMeta::MAX_RANK)
        .map_err(|fault| faults.list("shape", fault).with("found", found()))?;
    let shape: Option<Vec<u64>> = shape.iter().map(|&d| u64::try_from(d).ok()).collect();
    let shape = shape.ok_or_else(|| {
        faults.error("a dimension is negative").with("field", "shape").with("found", found())
    })?;
    TensorMeta::new(dtype, shape)
        .map_err(|error| faults.unusable("shape", error).with("found", found()))
}

/// Appends a result: the form of the sample's location, or a failure.
pub fn write_result(out: &mut Vec<u8>, outcome: &CaptureOutcome) -> Result<()> {
    match outcome {
        CaptureOutcome::Captured(descriptor) => write_descriptor(out, descriptor),
        CaptureOutcome::Failed { sample_id, error, cause, .. } => {
            out.extend_from_slice(b"{\"sample_id\":");
            write_string(out, sample_id.as_str());
            out.extend_from_slice(b",\"error\":");
            write_string(out, error);
            if let Some(cause) = cause {
                out.extend_from_slice(b",\"cause\":");
                write_string(out, cause.name());
            }
            out.push(b'}');
            Ok(())
        }
    }
}

fn write_descriptor(out: &mut Vec<u8>, descriptor: &Descriptor) -> Result<()> {
    let Descriptor { sample, features, aux_layer_ids, location, .. } = descriptor;
    if !matches!(location, Location::Store | Location::Arena(_) | Location::Token(_)) {
        return Err(Error::new(
            ErrorKind::Unsupported,
            "write capture result",
            "the location has no form on the wire",
        )
        .with("sample", sample));
    }
    let field = |out: &mut Vec<u8>, name: &str| {
        out.push(b',');
        write_string(out, name);
        out.push(b':');
    };
    let text = |out: &mut Vec<u8>, name: &str, value: &str| {
        field(out, name);
        write_string(out, value);
    };
    out.extend_from_slice(b"{\"sample_id\":");
    write_string(out, sample.sample_id.as_str());
    text(out, "store_id", sample.store_id.as_str());
    field(out, "gen");
    write_number(out, sample.generation.0);
    if let Location::Token(token) = location {
        text(out, "transport", &token.transport);
        text(out, "session_id", &token.session.to_string());
        text(out, "control_endpoint", &token.control.to_string());
        text(out, "control_token", &token.token);
    }
    field(out, "aux_layer_ids");
    write_value(out, aux_layer_ids);
    field(out, "features");
    out.push(b'{');
    for (i, (name, feature)) in features.iter().enumerate() {
        if i > 0 {
            out.push(b',');
        }
        write_string(out, name.as_str());
        out.push(b':');
        write_feature(out, feature, location);
    }
    out.push(b'}');
    if let Location::Arena(arena) = location {
        field(out, "arena");
        out.extend_from_slice(b"{\"session\":");
        write_string(out, &arena.session.to_string());
        text(out, "control", &arena.control.to_string());
        if let Some(holder) = &arena.holder {
            text(out, "holder", holder.as_str());
        }
        out.push(b'}');
        if let Some(epoch) = arena.epoch {
            field(out, "epoch");
            write_number(out, epoch.0);
        }
    }
    out.push(b'}');
    Ok(())
}

fn write_feature(out: &mut Vec<u8>, feature: &FeatureDescriptor, location: &Location) {
    let address = feature.address.filter(|_| !matches!(location, Location::Store));
    out.push(b'{');
    if let (Location::Token(_), Some(address)) = (location, address) {
        out.extend_from_slice(b"\"address\":");
        write_number(out, address.0);
        out.extend_from_slice(b",\"nbytes\":");
        write_number(out, feature.meta.nbytes());
        out.push(b',');
    }
    out.extend_from_slice(b"\"shape\":");
    write_value(out, feature.meta.shape());
    out.extend_from_slice(b",\"dtype\":");
    write_string(out, feature.meta.dtype().name());
    if let Location::Arena(_) = location {
        if let Some(address) = address {
            out.extend_from_slice(b",\"address\":");
            write_number(out, address.0);
        }
        if let Some(seq) = feature.seq {
            out.extend_from_slice(b",\"seq\":");
            write_number(out, seq.0);
        }
    }
    out.push(b'}');
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Result<CaptureOutcome> {
        parse_result(json, &Limits::default())
    }

    fn result(feature: &str, more: &str) -> String {
        format!(r#"{{"sample_id":"a","store_id":"s","gen":1,"features":{{"x":{feature}}}{more}}}"#)
    }

    const ARENA: &str = r#","arena":{"session":"h:1","control":"h:2"}"#;
    const TOKEN: &str =
        r#","transport":"rdma","session_id":"h:1","control_endpoint":"h:2","control_token":"hush""#;

    #[test]
    fn contradictions_are_refused() {
        let shape = r#""shape":[2,3],"dtype":"int64""#;
        let with = |more: &str| format!("{{{shape}{more}}}");
        for (feature, more, why) in [
            (r#"{"shape":[2],"dtype":"float7"}"#.into(), "", "dtype"),
            (r#"{"shape":[-2],"dtype":"int64"}"#.into(), "", "negative"),
            (r#"{"shape":[9223372036854775807,2],"dtype":"int64"}"#.into(), "", "shape"),
            (r#"{"shape":2,"dtype":"int64"}"#.into(), "", "shape"),
            (with(r#","nbytes":47"#), "", "nbytes"),
            (with(r#","address":512"#), "", "which process"),
            (with(""), ARENA, "no address"),
            (with(r#","address":0"#), ARENA, "null"),
            (with(r#","address":18446744073709551600"#), ARENA, "address space"),
            (with(r#","address":-512"#), ARENA, "address"),
            (with(r#","address":512"#), TOKEN, "nbytes"),
            (with(r#","address":512,"nbytes":49"#), TOKEN, "nbytes"),
            (with(r#","nbytes":48"#), TOKEN, "address"),
            (with(r#","address":512"#), &format!("{ARENA}{TOKEN}"), "two locations"),
            (
                with(r#","address":512"#),
                &format!("{ARENA}{}", ARENA.replace("arena", "nvlink")),
                "two locations",
            ),
            (
                with(r#","address":512"#),
                r#","arena":{"session":"h:1","control":"http://h:2/x"}"#,
                "abandoned",
            ),
            (with(r#","address":512"#), r#","arena":{"session":"::1","control":"h:2"}"#, "session"),
            (with(r#","address":512"#), &TOKEN.replace("rdma", "smoke"), "transport is unknown"),
            (with(""), r#","features":{}"#, "twice"),
        ] {
            let error = parse(&result(&feature, more)).unwrap_err().to_string();
            assert!(error.contains(why), "{feature} {more}: {error}");
            assert!(!error.contains("hush"), "{error}");
        }
        let huge = r#"{"shape":[9223372036854775807],"dtype":"uint8"}"#;
        let two = result(huge, "").replace("\"x\":", &format!("\"y\":{huge},\"x\":"));
        assert!(parse(&two).unwrap_err().to_string().contains("overflows"));
    }

    #[test]
    fn every_form_and_failure_is_read() {
        let feature = r#"{"shape":[2,3],"dtype":"int64","address":512,"nbytes":48}"#;
        let of = |more: &str| match parse(&result(feature, more)).unwrap() {
            CaptureOutcome::Captured(descriptor) => descriptor.location,
            failed => panic!("{failed:?}"),
        };
        let Location::Arena(arena) = of(ARENA) else { panic!("not an arena") };
        assert_eq!((arena.epoch, arena.holder), (None, None));
        assert_eq!(of(&ARENA.replace("arena", "nvlink")), of(ARENA));
        let Location::Token(token) = of(TOKEN) else { panic!("not a token location") };
        assert_eq!((&*token.transport, &*token.token), ("rdma", "hush"));
        let empty = r#"{"shape":[0,3],"dtype":"int64"}"#;
        assert!(parse(&result(empty, ARENA)).is_ok(), "no bytes, no address");
        for (more, cause) in [
            ("", None),
            (r#","cause":"queued""#, Some(FailureCause::Queued)),
            (r#","cause":"no_room""#, Some(FailureCause::NoRoom)),
            (r#","cause":"other""#, Some(FailureCause::Other)),
            (r#","cause":"of a newer server""#, None),
        ] {
            let failed = CaptureOutcome::Failed {
                sample_id: SampleId::new("a").unwrap(),
                error: "no room".into(),
                retryable: true,
                cause,
            };
            let text = format!(r#"{{"sample_id":"a","error":"no room"{more}}}"#);
            assert_eq!(parse(&text).unwrap(), failed, "{text}");
        }
        assert!(parse(r#"{"sample_id":"a","error":"no room","cause":1}"#).is_err());
    }
}
