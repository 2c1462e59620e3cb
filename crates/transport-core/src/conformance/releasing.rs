//! Cases about letting go: exactly once, and never of something newer.

use super::{
    Pair,
    context::{
        PLAIN, Verdict, ensure, expect_error, fetch_and_check, fetch_pool, key, publication,
        publish, publish_plain, release, release_now, settled,
    },
};
use crate::{ErrorKind, ReleaseReport};

pub(super) async fn letting_go_frees_nothing(pair: &mut Pair) -> Verdict {
    let descriptor = publish_plain(pair, "let go", 1).await?;
    // Not held at all, and then held.
    pair.consumer.let_go(vec![descriptor.clone()]).await?;
    for _ in 0..3 {
        fetch_and_check(&pair.consumer, &descriptor, 1).await?;
        pair.consumer.let_go(vec![descriptor.clone()]).await?;
    }
    fetch_and_check(&pair.consumer, &descriptor, 1).await?;
    let health = pair.publisher.health().await?;
    ensure!(health.resident_samples == 1, "{} samples are resident", health.resident_samples);
    pair.consumer.let_go(vec![descriptor.clone()]).await?;
    release_now(&pair.consumer, &descriptor).await?;
    settled("the sample went", &pair.publisher, |h| h.resident_samples == 0).await?;
    pair.consumer.let_go(vec![descriptor]).await?; // gone: nothing happens
    Ok(())
}

pub(super) async fn release_is_idempotent(pair: &mut Pair) -> Verdict {
    let descriptor = publish_plain(pair, "idempotent", 1).await?;
    fetch_and_check(&pair.consumer, &descriptor, 1).await?;
    release_now(&pair.consumer, &descriptor).await?;
    for _ in 0..3 {
        let report = release(&pair.consumer, &[&descriptor]).await?;
        expect_report(report, (0, 1, 0))?;
    }
    Ok(())
}

pub(super) async fn one_sample_twice_in_one_release(pair: &mut Pair) -> Verdict {
    let a = publish_plain(pair, "a", 1).await?;
    let b = publish_plain(pair, "b", 1).await?;
    let report = release(&pair.consumer, &[&a, &b, &a]).await?;
    expect_report(report, (2, 1, 0))
}

pub(super) async fn what_was_never_fetched_can_be_released(pair: &mut Pair) -> Verdict {
    let before = pair.publisher.health().await?;
    let batch = (0..10).map(|i| publication(&key(i), PLAIN, 1)).collect();
    let descriptors = publish(pair, batch).await?;
    let report = release(&pair.consumer, &descriptors.iter().collect::<Vec<_>>()).await?;
    expect_report(report, (10, 0, 0))?;
    settled("every byte is free again", &pair.publisher, |h| {
        h.arena_free_bytes == before.arena_free_bytes && h.resident_samples == 0
    })
    .await?;
    Ok(())
}

pub(super) async fn a_released_sample_cannot_be_fetched(pair: &mut Pair) -> Verdict {
    let descriptor = publish_plain(pair, "released", 1).await?;
    fetch_and_check(&pair.consumer, &descriptor, 1).await?;
    release_now(&pair.consumer, &descriptor).await?;
    settled("the sample went", &pair.publisher, |h| h.resident_samples == 0).await?;
    let kinds = &[ErrorKind::NotFound, ErrorKind::Stale, ErrorKind::OutOfRange];
    for _ in 0..2 {
        let result = fetch_pool(&pair.consumer, &descriptor).await;
        expect_error("fetching a released sample", result, kinds, &["key"])?;
    }
    Ok(())
}

pub(super) async fn an_older_descriptor_cannot_be_fetched(pair: &mut Pair) -> Verdict {
    let old = publish_plain(pair, "again", 1).await?;
    fetch_and_check(&pair.consumer, &old, 1).await?;
    release_now(&pair.consumer, &old).await?;
    // Most likely in the same place as before.
    let new = publish_plain(pair, "again", 2).await?;
    let result = fetch_pool(&pair.consumer, &old).await;
    let names = &["key", "expected", "found"];
    expect_error("fetching an older life of a key", result, &[ErrorKind::Stale], names)?;
    fetch_and_check(&pair.consumer, &new, 2).await?;
    release_now(&pair.consumer, &new).await
}

pub(super) async fn a_stale_release_leaves_the_newer_life_alone(pair: &mut Pair) -> Verdict {
    let old = publish_plain(pair, "stale", 1).await?;
    fetch_and_check(&pair.consumer, &old, 1).await?;
    release_now(&pair.consumer, &old).await?;
    let new = publish_plain(pair, "stale", 2).await?;
    for _ in 0..2 {
        let report = release(&pair.consumer, &[&old]).await?;
        expect_report(report, (0, 0, 1))?;
        fetch_and_check(&pair.consumer, &new, 2).await?;
        // Now the consumer holds the newer life, which makes no difference.
    }
    let report = release(&pair.consumer, &[&old, &new, &old]).await?;
    ensure!(
        report.released == 1 && report.stale >= 1 && report.stale + report.already_gone == 2,
        "old, new and old again: {report:?}"
    );
    settled("both lives went", &pair.publisher, |h| h.resident_samples == 0).await?;
    Ok(())
}

pub(super) async fn a_release_for_another_epoch_does_nothing(pair: &mut Pair) -> Verdict {
    let descriptor = publish_plain(pair, "epoch", 1).await?;
    fetch_and_check(&pair.consumer, &descriptor, 1).await?;
    let Some(other) = super::staleness::with_another_epoch(&descriptor) else {
        return Ok(()); // no epoch, so nothing to get wrong
    };
    match release(&pair.consumer, &[&other]).await {
        Ok(report) => ensure!(
            report.released + report.unconfirmed == 0,
            "a release for another epoch reports {report:?}"
        ),
        Err(error) => ensure!(
            error.kind() == ErrorKind::Stale || error.kind() == ErrorKind::PeerGone,
            "a release for another epoch fails with {error}"
        ),
    }
    fetch_and_check(&pair.consumer, &descriptor, 1).await?;
    release_now(&pair.consumer, &descriptor).await
}

fn expect_report(
    found: ReleaseReport,
    (released, already_gone, stale): (u64, u64, u64),
) -> Verdict {
    let mut wanted = ReleaseReport::default();
    (wanted.released, wanted.already_gone, wanted.stale) = (released, already_gone, stale);
    ensure!(found == wanted, "the release reports {found:?}, expected {wanted:?}");
    Ok(())
}
