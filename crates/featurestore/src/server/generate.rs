//! `POST /generate`: reserve, fill, publish, answer.

use std::{
    future::poll_fn,
    pin::Pin,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    body::{Body, HttpBody},
    extract::{Request, State},
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use capture_arena::{BATCHES_BEFORE, ReserveOptions, SamplePlan};
use control_proto::capture::{
    CHECKSUMS_HEADER, CaptureOutcome, CaptureRequest, ChecksumKind, FailureCause, HOLDER_HEADER,
    PATIENCE_HEADER, Prompt, Row, write_response,
};
use indexmap::IndexMap;
use tokio::{sync::OwnedSemaphorePermit, time::timeout};
use transport_core::{ClientId, Error, ErrorKind, FeatureName, Result, TensorMeta};

use super::{BODY_COST, BODY_FREE, BODY_UNIT, MAX_BODIES, Shared, bump, fill::Fill};

/// Longest time for which a body may arrive.
const BODY: Duration = Duration::from_secs(60);
/// Longest pause between two pieces of a body.
const STALL: Duration = Duration::from_secs(10);

pub(super) async fn generate(State(state): State<Arc<Shared>>, request: Request) -> Response {
    bump(&state.counts.requests, 1);
    let (head, body) = request.into_parts();
    let asked = match Asked::new(&head.headers, state.publisher.checksums()) {
        Ok(asked) => asked,
        Err(error) => return refusal(&error),
    };
    let (body, room) = match read(&state, body).await {
        Ok(read) => read,
        Err(refused) => return *refused,
    };
    let parsed = CaptureRequest::parse(&body, &state.limits);
    drop(body); // the prompts are parsed; a long wait need not keep the text
    let request = match parsed {
        Ok(request) => request,
        Err(error) => return refusal(&error),
    };
    let samples = request.prompts.len();
    if samples > state.max_in_flight {
        let why = "more samples than this server ever takes at a time";
        let error = Error::new(ErrorKind::InvalidInput, "capture", why)
            .with("limit", state.max_in_flight)
            .with("asked_for", samples)
            .remedy("send fewer prompts in a request, or raise --max-in-flight");
        return refusal(&error);
    }
    let places = state.places.clone();
    let Some(places) =
        u32::try_from(samples).ok().and_then(|n| places.try_acquire_many_owned(n).ok())
    else {
        bump(&state.counts.put_off, samples as u64);
        let error = Error::new(ErrorKind::Busy, "capture", "too many samples in flight")
            .with("limit", state.max_in_flight)
            .with("asked_for", samples)
            .remedy("ask again later, or raise --max-in-flight");
        return refusal(&error);
    };
    let (form, batched) = (request.form, request.batched);
    let work = Arc::new(Asking { prompts: request.prompts, _places: places, _room: room });
    let tokens = work.prompts.iter().map(|prompt| prompt.input_ids.len()).sum();
    let due = state.pace.as_ref().map(|pace| pace.due(samples, tokens));
    let rows = capture(&state, &work, asked).await;
    if let (Some(pace), Some(due)) = (&state.pace, due) {
        pace.wait(due).await;
    }
    let mut json = Vec::with_capacity(1024 * rows.len());
    match write_response(&mut json, form, batched, &rows) {
        Ok(()) => ([(header::CONTENT_TYPE, "application/json")], json).into_response(),
        Err(error) => refusal(&error),
    }
}

/// What a request was let in with: kept until nobody works on it any more, also if its client has
/// left by then.
#[derive(Debug)]
pub(super) struct Asking {
    pub(super) prompts: Vec<Prompt>,
    _places: OwnedSemaphorePermit,
    _room: Option<OwnedSemaphorePermit>,
}

/// Reads a body. Room beside the others in flight is taken as bytes arrive, not as they are
/// announced, and is given back with the request.
async fn read(
    state: &Shared,
    mut body: Body,
) -> Result<(Vec<u8>, Option<OwnedSemaphorePermit>), Box<Response>> {
    let refuse = |status, error: Error| Box::new(refusal_as(status, &error));
    let error = |kind, why: &'static str| Error::new(kind, "read body", why);
    let most = state.limits.body_bytes;
    let too_long = |found: u64| {
        let error = error(ErrorKind::InvalidInput, "the body is too long")
            .with("max_bytes", most)
            .with("found", found)
            .remedy("send fewer prompts in a request");
        refuse(StatusCode::PAYLOAD_TOO_LARGE, error)
    };
    let announced = body.size_hint().lower();
    if announced > most as u64 {
        return Err(too_long(announced));
    }
    let (mut bytes, mut room, mut counted) = (Vec::new(), None::<OwnedSemaphorePermit>, 0);
    let end = Instant::now() + BODY;
    loop {
        let left = end.saturating_duration_since(Instant::now()).min(STALL);
        let frame = poll_fn(|context| Pin::new(&mut body).poll_frame(context));
        let data = match timeout(left, frame).await {
            Ok(None) => return Ok((bytes, room)),
            Ok(Some(Ok(frame))) => frame.into_data().unwrap_or_default(),
            Ok(Some(Err(cause))) => {
                let error = error(ErrorKind::InvalidInput, "the body did not arrive").source(cause);
                return Err(refuse(StatusCode::BAD_REQUEST, error));
            }
            Err(_) => {
                let error = error(ErrorKind::Timeout, "the body did not arrive in time")
                    .with("after", format_args!("{BODY:?}, or {STALL:?} without a byte"));
                return Err(refuse(StatusCode::REQUEST_TIMEOUT, error));
            }
        };
        if bytes.len() + data.len() > most {
            return Err(too_long((bytes.len() + data.len()) as u64));
        }
        bytes.extend_from_slice(&data);
        let needed = (bytes.len().saturating_sub(BODY_FREE) * BODY_COST).div_ceil(BODY_UNIT);
        if needed > counted {
            let more = state.bodies.clone().acquire_many_owned((needed - counted) as u32);
            let Ok(Ok(more)) = timeout(state.deadline, more).await else {
                let error = error(ErrorKind::Busy, "too many bytes of requests in flight")
                    .with("limit", MAX_BODIES)
                    .remedy("ask again later");
                return Err(refuse(StatusCode::SERVICE_UNAVAILABLE, error));
            };
            counted = needed;
            match &mut room {
                Some(room) => room.merge(more),
                None => room = Some(more),
            }
        }
    }
}

/// What the request's headers ask for beyond the documented request.
struct Asked {
    holder: Option<ClientId>,
    checksums: Option<ChecksumKind>,
    patience: Option<Duration>,
}

impl Asked {
    /// `can` has the kinds of checksums that are made here.
    fn new(headers: &HeaderMap, can: &[ChecksumKind]) -> Result<Self> {
        let text = |name: &'static str| {
            headers.get(name).map(|value| value.to_str().unwrap_or_default().trim())
        };
        let holder = text(HOLDER_HEADER).map(str::parse).transpose()?;
        let kinds = text(CHECKSUMS_HEADER).map(ChecksumKind::parse_list).transpose()?;
        let choose = |kinds: Vec<ChecksumKind>| {
            kinds.iter().find(|kind| can.contains(kind)).copied().ok_or_else(|| {
                let can: Vec<_> = can.iter().map(|kind| kind.name()).collect();
                let why = "checksums of this kind are not made where the tensors are";
                Error::new(ErrorKind::Unsupported, "capture", why)
                    .with("header", CHECKSUMS_HEADER)
                    .with("found", format_args!("{kinds:?}"))
                    .remedy(format!("ask for {}", can.join(" or ")))
            })
        };
        let checksums = kinds.map(choose).transpose()?;
        let milliseconds = |value: &str| {
            value.parse().map(Duration::from_millis).map_err(|cause| {
                Error::new(ErrorKind::InvalidInput, "capture", "the patience is no number")
                    .with("header", PATIENCE_HEADER)
                    .with("found", format_args!("{value:?}"))
                    .remedy("send whole milliseconds, such as 1000")
                    .source(cause)
            })
        };
        let patience = text(PATIENCE_HEADER).map(milliseconds).transpose()?;
        Ok(Self { holder, checksums, patience })
    }
}

/// One row for each prompt, in order. Rows that cannot be planned fail alone; the others are
/// reserved together, those that replace apart from those that do not.
async fn capture(state: &Arc<Shared>, work: &Arc<Asking>, asked: Asked) -> Vec<Row> {
    let prompts = &work.prompts;
    let mut rows: Vec<Option<Row>> = prompts.iter().map(|_| None).collect();
    let mut groups: [Vec<(usize, SamplePlan)>; 2] = [Vec::new(), Vec::new()];
    for (i, prompt) in prompts.iter().enumerate() {
        match state.source.plan(prompt) {
            Ok(objects) => groups[usize::from(prompt.sample.replace)].push((
                i,
                SamplePlan {
                    sample: prompt.sample.sample.clone(),
                    objects,
                    holder: asked.holder.clone(),
                },
            )),
            Err(error) => {
                bump(&state.counts.failed, 1);
                rows[i] = Some(failed(prompt, &error));
            }
        }
    }
    let start = Instant::now();
    let patience = asked.patience.map_or(state.deadline, |most| most.min(state.deadline));
    for (replace, group) in [false, true].into_iter().zip(groups) {
        if group.is_empty() {
            continue;
        }
        let (places, plans): (Vec<usize>, Vec<SamplePlan>) = group.into_iter().unzip();
        let left = patience.saturating_sub(start.elapsed());
        let options = ReserveOptions::default().replace(replace).deadline(left);
        match publish(state, work, &places, plans, options, asked.checksums).await {
            Ok(published) => {
                bump(&state.counts.captured, places.len() as u64);
                for (place, row) in places.into_iter().zip(published) {
                    rows[place] = Some(row);
                }
            }
            Err(error) => {
                bump(&state.counts.failed, places.len() as u64);
                tracing::info!(%error, samples = places.len(), "a batch was not captured");
                for place in places {
                    rows[place] = Some(failed(&prompts[place], &error));
                }
            }
        }
    }
    rows.into_iter().map(|row| row.expect("every prompt is in a group or has failed")).collect()
}

async fn publish(
    state: &Arc<Shared>,
    work: &Arc<Asking>,
    places: &[usize],
    plans: Vec<SamplePlan>,
    options: ReserveOptions,
    checksums: Option<ChecksumKind>,
) -> Result<Vec<Row>> {
    let names: Vec<Vec<(FeatureName, TensorMeta)>> =
        plans.iter().map(|plan| plan.objects.clone()).collect();
    let reservation = state.publisher.reserve(plans, options).await?;
    let objects = names.iter().map(Vec::len).collect();
    let fill = Fill::new(state.clone(), work.clone(), places.to_vec(), objects, checksums);
    let (mut reservation, filled) = fill.run(reservation).await?;
    let named = names.into_iter().map(|names| names.into_iter().map(|(name, _)| name));
    let sums = named.zip(filled).map(|(names, filled)| {
        checksums.map(|_| names.zip(filled).collect::<IndexMap<FeatureName, _>>())
    });
    for sample in 0..places.len() {
        reservation.set_aux_layer_ids(sample, state.source.aux_layer_ids());
    }
    let described = reservation.publish().await?;
    let row =
        |(descriptor, checksums)| Row { outcome: CaptureOutcome::Captured(descriptor), checksums };
    Ok(described.into_iter().zip(sums).map(row).collect())
}

fn failed(prompt: &Prompt, error: &Error) -> Row {
    let sample_id = prompt.sample.sample.sample_id.clone();
    let retryable = error.is_temporary();
    let cause = Some(match error.kind() {
        ErrorKind::CapacityExceeded if retryable => FailureCause::NoRoom,
        ErrorKind::Busy if error.context(BATCHES_BEFORE).is_some() => FailureCause::Queued,
        _ => FailureCause::Other,
    });
    let outcome = CaptureOutcome::Failed { sample_id, error: error.to_string(), retryable, cause };
    Row { outcome, checksums: None }
}

/// An answer that says why a request was not served.
pub(super) fn refusal(error: &Error) -> Response {
    let status = match error.kind() {
        ErrorKind::Busy | ErrorKind::CapacityExceeded | ErrorKind::Closed => {
            StatusCode::SERVICE_UNAVAILABLE
        }
        ErrorKind::InvalidInput | ErrorKind::Protocol | ErrorKind::Corrupt => {
            StatusCode::BAD_REQUEST
        }
        ErrorKind::Unsupported => StatusCode::BAD_REQUEST,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    };
    refusal_as(status, error)
}

fn refusal_as(status: StatusCode, error: &Error) -> Response {
    let body = serde_json::json!({ "error": error.to_string() }).to_string();
    let mut response = (status, [(header::CONTENT_TYPE, "application/json")], body).into_response();
    if status == StatusCode::SERVICE_UNAVAILABLE {
        response.headers_mut().insert(header::RETRY_AFTER, header::HeaderValue::from_static("1"));
    }
    response
}
