"""The conversation that the demo has: an agent at an order desk, with tools and what they return.

Scripted, so that every run asks the same. The model's answers are its own, and become part of the
history like in any agent. What the tools return goes into the user's messages: the model's chat
template knows no other role for it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

Message = dict[str, str]

ANSWER_TOKENS = 48
"""Longest answer. Enough for a sentence or two, and a small model should not say more."""


@dataclass(frozen=True)
class ScriptedTurn:
    """What the user asks, after a tool has returned something."""

    question: str
    tool: str
    arguments: dict[str, Any]
    result: str

    def message(self) -> Message:
        """The user's message of this turn."""
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        return {
            "role": "user",
            "content": f"{self.tool}({arguments}) returned:\n{self.result}\n\n{self.question}",
        }


def _tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    properties = {
        parameter: {"type": "string", "description": meaning}
        for parameter, meaning in parameters.items()
    }
    return {
        "name": name,
        "description": description,
        "parameters": {"type": "object", "properties": properties},
    }


TOOLS = [
    _tool(
        "search_orders",
        "List the orders of a customer, newest first, with status, date and total.",
        customer_id="Customer number, such as C-2041.",
        status="Only orders in this status: open, packed, shipped, delivered or returned.",
        since="Only orders placed on or after this day, as YYYY-MM-DD.",
    ),
    _tool(
        "get_order",
        "Everything about one order: items, quantities, prices, address and payment.",
        order_id="Order number, such as 7315.",
    ),
    _tool(
        "get_inventory",
        "How many pieces of an item each warehouse has, and when more will arrive.",
        sku="Item number, such as LAMP-20.",
        warehouse="Only this warehouse: Hamburg, Lyon or Turin.",
    ),
    _tool(
        "reserve_stock",
        "Set pieces of an item aside for an order, for two days.",
        order_id="Order number.",
        sku="Item number.",
        quantity="How many pieces.",
        warehouse="The warehouse to take them from.",
    ),
    _tool(
        "track_parcel",
        "Where a parcel is: every scan so far, with time, place and event.",
        parcel_id="Parcel number, such as P-88120.",
    ),
    _tool(
        "get_invoice",
        "The invoice of an order: lines, taxes, discounts, what was paid and how.",
        order_id="Order number.",
    ),
    _tool(
        "refund_payment",
        "Pay back some or all of an order. Needs a reason. Cannot be undone.",
        order_id="Order number.",
        amount="Amount in euros.",
        reason="One of: damaged, late, wrong_item, returned, goodwill.",
    ),
    _tool(
        "change_address",
        "Change the delivery address of an order that has not been shipped yet.",
        order_id="Order number.",
        street="Street and number.",
        city="City, with its postal code.",
        country="Country, as two letters.",
    ),
    _tool(
        "open_ticket",
        "Hand a case over to a person. Say what was tried, and what the customer expects.",
        order_id="Order number.",
        summary="The case in two or three sentences.",
        priority="low, normal or high.",
    ),
    _tool(
        "send_message",
        "Send an e-mail to the customer of an order, in the customer's language.",
        order_id="Order number.",
        subject="Subject line.",
        body="Text of the message.",
    ),
]

_RULES = """\
You are the assistant at the order desk of Norlund, a shop for lamps and furniture. You help the \
people who work there to answer customers.
Answer in one short sentence. Use only what the tools returned. Name order numbers, amounts and \
dates exactly as they were returned. If the tools did not return what is asked for, say so.
You can use these tools:
"""


def system_message() -> Message:
    """The rules and the list of tools, about 1,200 tokens."""
    tools = "\n".join(json.dumps(tool) for tool in TOOLS)
    return {"role": "system", "content": _RULES + tools}


SCRIPT = (
    ScriptedTurn(
        "Which order of this customer is still open?",
        "search_orders",
        {"customer_id": "C-2041"},
        """\
order 7315, open, placed 2026-03-02, 3 items, total 412.50 EUR
order 7290, shipped, placed 2026-02-24, 1 item, total 89.00 EUR
order 7122, delivered, placed 2026-01-17, 2 items, total 140.20 EUR
order 6980, returned, placed 2025-12-05, 1 item, total 59.90 EUR
order 6741, delivered, placed 2025-10-30, 4 items, total 611.00 EUR
order 6533, delivered, placed 2025-09-12, 1 item, total 24.90 EUR""",
    ),
    ScriptedTurn(
        "To which city will order 7315 be delivered?",
        "get_order",
        {"order_id": "7315"},
        """\
order: 7315
customer: C-2041, Ingrid Halvorsen
status: open, waiting for stock
delivery address: Strandgata 14, 5004 Bergen, NO
item 1: LAMP-20, floor lamp, brass, quantity 2, 149.00 EUR each
item 2: SHADE-7, linen shade, sand, quantity 2, 32.25 EUR each
item 3: BULB-E27, LED bulb, 8 W, quantity 10, 5.00 EUR each
payment: card ending in 4471, authorised 2026-03-02
note: deliver everything together; call before delivery""",
    ),
    ScriptedTurn(
        "Which warehouse has the most LAMP-20 in stock?",
        "get_inventory",
        {"sku": "LAMP-20"},
        """\
Hamburg: 0 in stock, 0 reserved, next delivery 2026-03-19, 40 pieces
Lyon: 1 in stock, 1 reserved, next delivery 2026-03-27, 24 pieces
Turin: 16 in stock, 5 reserved, next delivery 2026-04-02, 60 pieces
supplier: Ottone Luci, lead time 21 days, minimum order 20 pieces
weight: 6.4 kg, packed 48 x 32 x 160 cm, fragile
sold in the last 30 days: Hamburg 22, Lyon 9, Turin 14""",
    ),
    ScriptedTurn(
        "Where was parcel P-88120 scanned last?",
        "track_parcel",
        {"parcel_id": "P-88120"},
        """\
2026-02-25 08:12, Turin warehouse, label printed for order 7290
2026-02-25 16:40, Turin warehouse, handed to the carrier
2026-02-26 02:05, Milan hub, sorted
2026-02-26 21:30, Munich hub, sorted
2026-02-27 09:55, Hamburg hub, sorted, delayed by weather
2026-02-28 23:10, Hamburg hub, loaded on ferry truck
2026-03-01 18:45, Oslo customs, held, papers requested
2026-03-03 11:20, Oslo customs, released
2026-03-04 06:15, Bergen depot, arrived, delivery planned for 2026-03-05""",
    ),
    ScriptedTurn(
        "How much was paid for order 7290 in total?",
        "get_invoice",
        {"order_id": "7290"},
        """\
invoice: 2026-00417, dated 2026-02-24
line 1: STOOL-3, oak stool, quantity 1, 79.00 EUR
line 2: shipping to Norway, 18.00 EUR
discount: SPRING10, 8.00 EUR
total paid: 89.00 EUR, by card ending in 4471
taxes: export, no VAT charged
customs: declared value 71.00 EUR, tariff number 9401.61
status: settled 2026-02-25, no refunds""",
    ),
    ScriptedTurn(
        "What is the number of the ticket, and who will take care of it?",
        "open_ticket",
        {"order_id": "7315", "priority": "normal"},
        """\
ticket: T-5502
order: 7315, customer C-2041, Ingrid Halvorsen
opened: 2026-03-04 09:32, priority normal, queue stock
assigned to: Marek, order desk Hamburg, on duty until 18:00
next step: take 2 LAMP-20 from Turin, ship with SHADE-7 and BULB-E27 from Hamburg
due: 2026-03-06 12:00
watchers: order desk, warehouse Turin""",
    ),
)
"""Six turns; the prompt grows by 150 to 350 tokens with each."""
