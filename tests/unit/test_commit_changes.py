"""What an engine says of a container's files, put together over images and compared."""

from __future__ import annotations

from snapshot_drivers.commit.changes import ADDED, DELETED, MODIFIED, differences, stacked, without_directories


def test_directories_that_only_stand_above_a_change_are_left_out() -> None:
    found = [("/srv", MODIFIED), ("/srv/a", MODIFIED), ("/srv/a/f", ADDED), ("/etc", MODIFIED), ("/srv/new", ADDED)]
    found += [("/.orchestrator", ADDED), ("/.orchestrator/x", ADDED), ("/srv/new/g", ADDED)]
    assert without_directories(found, "/.orchestrator") == (
        ("/etc", MODIFIED),
        ("/srv/a/f", ADDED),
        ("/srv/new", ADDED),
        ("/srv/new/g", ADDED),
    )


def test_a_second_list_is_relative_to_what_the_first_one_made() -> None:
    lower = (("/a", ADDED), ("/d", ADDED), ("/d/x", ADDED), ("/g", DELETED), ("/i", MODIFIED), ("/old/x", MODIFIED))
    upper = (("/a", MODIFIED), ("/d", DELETED), ("/g", ADDED), ("/i", DELETED), ("/new", ADDED), ("/old", DELETED))
    assert stacked(lower, upper) == (
        ("/a", ADDED),
        ("/g", MODIFIED),
        ("/i", DELETED),
        ("/new", ADDED),
        ("/old", DELETED),
    )


def test_what_is_in_one_list_alone_differs_as_that_list_says_and_the_other_way_round() -> None:
    one, two = (
        (("/added", ADDED), ("/changed", MODIFIED), ("/gone", DELETED), ("/same", MODIFIED)),
        (("/same", MODIFIED),),
    )
    assert list(differences(two, one)) == [("A", "/added"), ("M", "/changed"), ("D", "/gone")]
    assert list(differences(one, two)) == [("D", "/added"), ("M", "/changed"), ("A", "/gone")]
    assert list(differences((("/p", DELETED),), (("/p", MODIFIED),))) == [("A", "/p")]
    assert list(differences((("/p", MODIFIED),), (("/p", DELETED),))) == [("D", "/p")]
