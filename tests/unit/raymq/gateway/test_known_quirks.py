"""The quirks of the official clients that the gateway allows for, each with the tests that hold it.

A change of a quirk's test must keep the quirk: the clients that have it stay in use for years.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[3]
CALLS = "component/gateway/test_gateway_calls.py"
RECEIVES = "component/gateway/test_gateway_receives.py"
MEMBERS = "component/gateway/test_gateway_members.py"
LANGUAGES = "component/gateway/test_requests_of_other_languages.py"
SETTINGS = "unit/raymq/gateway/test_client_settings.py"
ROUTES = "unit/raymq/gateway/test_routes.py"
STATUSES = "unit/raymq/gateway/test_statuses.py"
MESSAGES = "unit/raymq/gateway/test_messages.py"

QUIRKS = {
    "Q1: all calls go to the endpoints in the route, not to those of the client's configuration": [
        (CALLS, "test_a_route_has_the_endpoints_that_the_client_used"),
        (CALLS, "test_an_advertised_address_is_in_all_routes"),
        (ROUTES, "test_illegal_endpoints_are_refused"),
    ],
    "Q2: Node uses only queues whose own id is 0; Java names a queue in each message": [
        (ROUTES, "test_queues_that_can_be_read_and_written_are_first"),
        (RECEIVES, "test_a_message_at_another_broker_group_is_received_at_once"),
        (LANGUAGES, "test_a_java_producer_names_a_queue_and_the_gateway_chooses_one"),
    ],
    "Q3: Node fails at a message without a digest; the text of a CRC32 differs": [
        (MESSAGES, "test_a_received_message_has_a_receipt_a_digest_and_its_place"),
        ("unit/raymq/gateway/test_bodies.py", "test_a_checksum_with_leading_zeros_matches_in_both_hexadecimal_texts"),
        (LANGUAGES, "test_a_csharp_producer_has_a_digest_without_leading_zeros"),
    ],
    "Q4: Node's consumers know only exponential times, and take seconds for milliseconds": [
        (SETTINGS, "test_each_client_but_nodes_gets_the_list_of_times"),
    ],
    "Q5: Python's times are whole seconds; Java and Go fail without a list of times": [
        (SETTINGS, "test_no_time_is_shorter_than_a_second_for_clients_with_whole_seconds"),
        (LANGUAGES, "test_a_java_push_consumer_starts_receives_and_settles"),
    ],
    "Q6: Python drops a message whose body encoding is not set": [
        (MESSAGES, "test_a_received_message_has_a_receipt_a_digest_and_its_place"),
    ],
    "Q7: each client acknowledges one message per call": [
        (
            "unit/raymq/gateway/test_gathered_acks.py",
            "test_requests_that_arrive_during_a_call_go_together_with_the_next_call",
        ),
    ],
    "Q8: Python opens a broken stream again only after minutes": [
        (CALLS, "test_a_client_of_which_the_gateway_knows_nothing_is_registered_by_its_heartbeat"),
        (LANGUAGES, "test_the_heartbeats_of_go_clients_register_them"),
    ],
    "Q9: Node's shutdown waits for its long polls": [
        (RECEIVES, "test_a_receive_that_waits_is_answered_at_once_when_its_client_or_the_gateway_ends"),
    ],
    "Q10: Python signs without credentials, and in local time": [
        ("unit/raymq/gateway/test_signatures.py", "test_a_signature_in_the_time_of_any_zone_is_accepted"),
        ("component/gateway/test_gateway_access.py", "test_a_signature_is_valid_for_the_time_zones_of_the_world_only"),
    ],
    "Q11: Node names its namespace in a header only": [
        (CALLS, "test_the_namespace_of_the_resource_or_the_header_is_part_of_the_stored_name"),
        (ROUTES, "test_the_namespace_is_in_the_resource_or_in_the_header"),
    ],
    "Q12: Python takes the new handle of a changed lease before it reads the status": [
        (RECEIVES, "test_entries_with_wrong_handles_do_not_stop_the_others"),
    ],
    "Q13: clients need as many entries as messages, and read them only after MULTIPLE_RESULTS": [
        (CALLS, "test_a_request_with_an_illegal_message_stores_nothing"),
        (STATUSES, "test_entries_with_different_codes_have_multiple_results"),
    ],
    "Q14: clients count an answer to a receive without a status as a fault": [
        (RECEIVES, "test_an_answer_of_a_receive_without_a_client_id_has_a_status"),
        (RECEIVES, "test_messages_are_received_and_settled_by_their_handles"),
    ],
    "Q15: Python stops its retries at TOO_MANY_REQUESTS": [
        (STATUSES, "test_only_a_busy_server_and_a_quota_stop_the_retries_of_clients"),
    ],
    "Q16: clients repeat a failed change of a lease for ever, unless its handle is invalid": [
        (RECEIVES, "test_entries_with_wrong_handles_do_not_stop_the_others"),
        (RECEIVES, "test_messages_are_received_and_settled_by_their_handles"),
    ],
    "Q17: Python's retries of a send have one id, and the program's next send has another": [
        (CALLS, "test_a_repeated_send_is_stored_once_and_gets_the_same_answer"),
    ],
    "Python's client answers no question of an administrator, Node's refuses one": [
        (MEMBERS, "test_a_client_that_does_not_answer_has_no_stacks_and_consumes_nothing"),
        (MEMBERS, "test_a_node_client_refuses_to_consume_a_message_at_once"),
    ],
}


@pytest.mark.parametrize("quirk", QUIRKS)
def test_each_quirk_of_a_client_has_its_tests(quirk: str) -> None:
    for file, test in QUIRKS[quirk]:
        body = ast.parse((TESTS / file).read_text()).body
        assert test in {one.name for one in body if isinstance(one, ast.FunctionDef)}, f"{file}: {test}"
