//! Cases about several clients, publishers that die, and older ones.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    Pair,
    context::{
        PLAIN, Stop, Verdict, check_bytes, ensure, expect_error, fetch_and_check, fetch_pool, key,
        publication, publish_options, publish_plain, publish_with, release, release_now, settled,
    },
};
use crate::{Destination, ErrorKind, FetchOptions, FetchRequest, Transport};

pub(super) async fn a_sample_goes_with_its_last_holder(pair: &mut Pair) -> Verdict {
    let second = second(pair)?;
    let descriptor = publish_plain(pair, "shared", 1).await?;
    fetch_and_check(&pair.consumer, &descriptor, 1).await?;
    fetch_and_check(&second, &descriptor, 1).await?;
    release_now(&pair.consumer, &descriptor).await?;
    let health = pair.publisher.health().await?;
    ensure!(
        health.resident_samples == 1,
        "the second consumer holds the sample, but {} are resident",
        health.resident_samples
    );
    fetch_and_check(&second, &descriptor, 1).await?;
    release_now(&second, &descriptor).await?;
    settled("the sample went", &pair.publisher, |h| {
        h.resident_samples == 0 && h.released_samples == 1
    })
    .await?;
    for consumer in [&pair.consumer, &second] {
        let report = release(consumer, &[&descriptor]).await?;
        ensure!(report.already_gone == 1, "released twice: {report:?}");
    }
    Ok(())
}

pub(super) async fn a_stranger_cannot_take_memory_from_a_holder(pair: &mut Pair) -> Verdict {
    let second = second(pair)?;
    let descriptor = publish_plain(pair, "held", 1).await?;
    let fetched = fetch_and_check(&pair.consumer, &descriptor, 1).await?;
    // The second consumer never fetched it. Whether its release counts or not, the holder keeps
    // what it holds.
    release(&second, &[&descriptor]).await?;
    let health = pair.publisher.health().await?;
    ensure!(
        health.resident_samples == 1,
        "the sample is held, but {} are resident",
        health.resident_samples
    );
    for round in 0..20 {
        let other = publish_plain(pair, &format!("other {round}"), 2).await?;
        release_now(&second, &other).await?;
    }
    check_bytes(&fetched, 1)?;
    drop(fetched);
    release(&pair.consumer, &[&descriptor]).await?;
    settled("the sample went", &pair.publisher, |h| h.resident_samples == 0).await?;
    Ok(())
}

pub(super) async fn what_drains_goes_when_it_is_let_go(pair: &mut Pair) -> Verdict {
    let second = second(pair)?;
    let descriptor = publish_plain(pair, "read", 1).await?;
    let fetched = fetch_and_check(&pair.consumer, &descriptor, 1).await?;
    release(&second, &[&descriptor]).await?;
    let health = pair.publisher.health().await?;
    ensure!(health.resident_samples == 1, "{} samples are resident", health.resident_samples);
    drop(fetched);
    pair.consumer.let_go(vec![descriptor.clone()]).await?;
    settled("the sample went", &pair.publisher, |h| {
        h.resident_samples == 0 && h.published_samples == h.released_samples
    })
    .await?;
    Ok(())
}

pub(super) async fn a_replaced_life_waits_for_all_holders(pair: &mut Pair) -> Verdict {
    let second = second(pair)?;
    let old = publish_plain(pair, "replaced", 1).await?;
    fetch_and_check(&pair.consumer, &old, 1).await?;
    fetch_and_check(&second, &old, 1).await?;
    let batch = vec![publication(&key("replaced"), PLAIN, 2)];
    let new = publish_with(pair, batch, publish_options().replace(true)).await?.remove(0);
    for (consumer, resident) in [(&second, 2), (&pair.consumer, 1)] {
        release_now(consumer, &old).await?;
        settled("old lives go with their last holder", &pair.publisher, |h| {
            h.resident_samples == resident
        })
        .await?;
    }
    fetch_and_check(&second, &new, 2).await?;
    release_now(&second, &new).await
}

pub(super) async fn a_killed_publisher_is_an_error_in_time(pair: &mut Pair) -> Verdict {
    let held = publish_plain(pair, "held", 1).await?;
    let fetched = fetch_and_check(&pair.consumer, &held, 1).await?;
    let unread = publish_plain(pair, "unread", 1).await?;
    let kill = pair.kill_publisher.take().expect("asked for by the case");
    kill().await?;
    check_bytes(&fetched, 1)?; // what was copied stays
    let start = Instant::now();
    let options = FetchOptions::default().deadline(Duration::from_secs(2));
    let request = FetchRequest::new(unread, Destination::Pool);
    let result = pair.consumer.fetch(vec![request], options).await;
    let kinds = &[ErrorKind::PeerGone, ErrorKind::Timeout, ErrorKind::Stale, ErrorKind::NotFound];
    expect_error("a fetch from a killed publisher", result, kinds, &[])?;
    let took = start.elapsed();
    ensure!(took < Duration::from_secs(7), "a deadline of 2 s took {took:?}");
    // The memory is gone with its publisher: whatever a release says, it must say it in time.
    let samples = [&held];
    let released = release(&pair.consumer, &samples);
    let released = tokio::time::timeout(Duration::from_secs(15), released).await;
    let Ok(released) = released else {
        return Err(Stop::Failed("a release to a killed publisher took more than 15 s".into()));
    };
    if let Err(error) = released {
        ensure!(
            kinds.contains(&error.kind()),
            "a release to a killed publisher fails with {error}"
        );
    }
    Ok(())
}

pub(super) async fn an_older_publisher_is_read(pair: &mut Pair) -> Verdict {
    let descriptor = publish_plain(pair, "older", 1).await?;
    ensure!(
        descriptor.epoch().is_none() && descriptor.features.values().all(|f| f.seq.is_none()),
        "the harness offers an older publisher, but it describes lives: {descriptor:?}"
    );
    let fetched = fetch_and_check(&pair.consumer, &descriptor, 1).await?;
    ensure!(
        !fetched.staleness_checked,
        "without epoch and sequence numbers, staleness cannot have been checked"
    );
    release_now(&pair.consumer, &descriptor).await?;
    settled("the sample went", &pair.publisher, |h| h.resident_samples == 0).await?;
    let again = publish_plain(pair, "older", 2).await?;
    fetch_and_check(&pair.consumer, &again, 2).await?;
    release_now(&pair.consumer, &again).await
}

pub(super) async fn staleness_is_reported_as_checked(pair: &mut Pair) -> Verdict {
    let descriptor = publish_plain(pair, "checked", 1).await?;
    let fetched = fetch_pool(&pair.consumer, &descriptor).await?;
    ensure!(
        fetched.staleness_checked,
        "the capability says that staleness is checked, the fetch says it was not"
    );
    release_now(&pair.consumer, &descriptor).await
}

pub(super) fn second(pair: &Pair) -> Verdict<Arc<dyn Transport>> {
    pair.second_consumer
        .clone()
        .ok_or_else(|| Stop::NotApplicable("the pair has no second consumer".into()))
}
